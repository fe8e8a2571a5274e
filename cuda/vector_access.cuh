// SPDX-License-Identifier: Apache-2.0
//
// Accesses of 1, 2, 4, 8 or 16 bytes, and the registers that hold them.
#ifndef JAX_LAYOUT_CUDA_VECTOR_ACCESS_CUH_
#define JAX_LAYOUT_CUDA_VECTOR_ACCESS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_layout {

template <int kBytes>
struct WordType;
template <>
struct WordType<1> {
  using Type = unsigned char;
};
template <>
struct WordType<2> {
  using Type = unsigned short;
};
template <>
struct WordType<4> {
  using Type = unsigned int;
};
template <>
struct WordType<8> {
  using Type = uint2;
};
template <>
struct WordType<16> {
  using Type = uint4;
};
template <int kBytes>
using Word = typename WordType<kBytes>::Type;

// kBytes in 32-bit registers; one or two bytes sit in the low end of one.
template <int kBytes>
struct Packet {
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t word[kWords];
};

template <int kBytes>
__device__ inline Packet<kBytes> Unpack(const Word<kBytes>& w) {
  if constexpr (kBytes == 16) {
    return {{w.x, w.y, w.z, w.w}};
  } else if constexpr (kBytes == 8) {
    return {{w.x, w.y}};
  } else {
    return {{w}};
  }
}

template <int kBytes>
__device__ inline Word<kBytes> Pack(const Packet<kBytes>& p) {
  if constexpr (kBytes == 16) {
    return make_uint4(p.word[0], p.word[1], p.word[2], p.word[3]);
  } else if constexpr (kBytes == 8) {
    return make_uint2(p.word[0], p.word[1]);
  } else {
    return static_cast<Word<kBytes>>(p.word[0]);
  }
}

// x is read-only while a kernel runs, so it may take the read-only path.
template <int kBytes>
__device__ inline Packet<kBytes> LoadGlobal(const char* from) {
  return Unpack<kBytes>(__ldg(reinterpret_cast<const Word<kBytes>*>(from)));
}

// A plain store: the intrinsic __stwb is volatile to the compiler and becomes a
// strongly ordered one. The emulation's __stwb checks each access.
template <int kBytes>
__device__ inline void StoreGlobal(char* to, const Packet<kBytes>& p) {
#ifdef __CUDACC__
  *reinterpret_cast<Word<kBytes>*>(to) = Pack<kBytes>(p);
#else
  __stwb(reinterpret_cast<Word<kBytes>*>(to), Pack<kBytes>(p));
#endif
}

// The same of bytes that nothing is to find in a cache again: they leave it
// first.
template <int kBytes>
__device__ inline Packet<kBytes> LoadStreaming(const char* from) {
  return Unpack<kBytes>(__ldcs(reinterpret_cast<const Word<kBytes>*>(from)));
}

template <int kBytes>
__device__ inline void StoreStreaming(char* to, const Packet<kBytes>& p) {
  __stcs(reinterpret_cast<Word<kBytes>*>(to), Pack<kBytes>(p));
}

// kBytes from anywhere, 4, 12 or 16, as the words around them: to join them is
// to wait for them.
template <int kBytes>
struct Around {
  Packet<kBytes + 4> words;
  uint32_t past;  // bytes of the first word that are before them

  __device__ Packet<kBytes> Join() const {
    Packet<kBytes> out;
#pragma unroll
    for (int w = 0; w < kBytes / 4; ++w) {
      out.word[w] = __funnelshift_r(words.word[w], words.word[w + 1], past * 8);
    }
    return out;
  }
};

// All words must be there, and one after them.
template <int kBytes>
__device__ inline Around<kBytes> LoadAround(const char* from) {
  Around<kBytes> out;
  const auto address = reinterpret_cast<uintptr_t>(from);
  const char* words = reinterpret_cast<const char*>(address & ~uintptr_t{3});
  out.past = static_cast<uint32_t>(address & 3);
#pragma unroll
  for (int w = 0; w <= kBytes / 4; ++w) {
    out.words.word[w] = LoadGlobal<4>(words + 4 * w).word[0];
  }
  return out;
}

// The same one by one. From `end` on the last byte before it is taken again.
// Few tiles need this, and it is to take no registers from the others.
template <int kBytes>
__device__ inline Around<kBytes> LoadBytes(const char* from, const char* end) {
  Around<kBytes> out = {};
#pragma unroll
  for (int w = 0; w < kBytes / 4; ++w) {
#pragma unroll 1
    for (int b = 0; b < 4; ++b) {
      const char* at = from + 4 * w + b;
      at = at < end ? at : end - 1;
      out.words.word[w] |= LoadGlobal<1>(at).word[0] << (8 * b);
    }
  }
  return out;
}

// Of the bytes of a row that are in no whole vector of its own, less than one
// at each end, that of a slot in 0 to 2 kVector - 1; -1 if there is none.
template <int kVector>
__device__ inline int EdgeByte(const char* row, int bytes, int slot) {
  const int past =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) & (kVector - 1));
  // Where whole vectors begin and end.
  const int next = -past & (kVector - 1), first = next < bytes ? next : bytes;
  const int end = ((bytes + past) & -kVector) - past;
  const int last = end > first ? end : first;
  const int at = slot < kVector ? slot : last + slot - kVector;
  return at < (slot < kVector ? first : bytes) ? at : -1;
}

template <int kBytes>
__device__ inline Packet<kBytes> LoadShared(const char* from) {
  return Unpack<kBytes>(*reinterpret_cast<const Word<kBytes>*>(from));
}

// Said in PTX, as nvcc takes some stores of 16 bytes apart into words, which
// meet in the same banks.
template <int kBytes>
__device__ inline void StoreShared(char* to, const Packet<kBytes>& p) {
#ifdef __CUDACC__
  if constexpr (kBytes == 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                   "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]),
                   "r"(p.word[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Word<kBytes>*>(to) = Pack<kBytes>(p);
}

// out[c] = bytes c of in[0], in[1], ... in that order.
__device__ inline void TransposeBytes(const uint32_t (&in)[4],
                                      uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(in[0], in[1], 0x5140);  // a0 b0 a1 b1
  const uint32_t cd_low = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t ab_high = __byte_perm(in[0], in[1], 0x7362);  // a2 b2 a3 b3
  const uint32_t cd_high = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// The block's dynamic shared memory.
extern __shared__ uint4 shared_memory[];

__device__ inline char* SharedMemory() {
  return reinterpret_cast<char*>(shared_memory);
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_VECTOR_ACCESS_CUH_
