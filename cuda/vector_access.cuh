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

template <int kBytes>
__device__ inline Packet<kBytes> LoadShared(const char* from) {
  return Unpack<kBytes>(*reinterpret_cast<const Word<kBytes>*>(from));
}

template <int kBytes>
__device__ inline void StoreShared(char* to, const Packet<kBytes>& p) {
  *reinterpret_cast<Word<kBytes>*>(to) = Pack<kBytes>(p);
}

// The block's dynamic shared memory.
extern __shared__ uint4 shared_memory[];

__device__ inline char* SharedMemory() {
  return reinterpret_cast<char*>(shared_memory);
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_VECTOR_ACCESS_CUH_
