// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <vector>

#pragma GCC target("avx2")
#include "cpu/permute/bytes16.h"
#include "cpu/permute/ymm.h"

namespace jax_layout {
namespace {

struct Avx2 : Ymm {
  using Half = Bytes16;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE void CopyPart(char* y, const char* x,
                                         int64_t bytes) {
    CopyShort(y, x, bytes);
  }
};

// The vector of programs: one lane, as a byte shuffle does not cross lanes.
struct Ssse3 {
  using Reg = __m128i;
  static constexpr int kBytes = 16;

  static JAX_LAYOUT_INLINE Reg Zero() { return _mm_setzero_si128(); }
  static JAX_LAYOUT_INLINE Reg LoadPart(const char* p, int64_t bytes) {
    if (bytes < 16) {
      char part[16] = {};
      CopyShort(part, p, bytes);
      return _mm_loadu_si128(reinterpret_cast<const Reg*>(part));
    }
    return Load(p);
  }
  static JAX_LAYOUT_INLINE void Store(char* p, Reg v) {
    _mm_storeu_si128(reinterpret_cast<Reg*>(p), v);
  }
  static JAX_LAYOUT_INLINE void Stream(char* p, Reg v) {
    _mm_stream_si128(reinterpret_cast<Reg*>(p), v);
  }
  static JAX_LAYOUT_INLINE void StorePart(char* p, Reg v, int64_t bytes) {
    char part[16];
    Store(part, v);
    CopyShort(p, part, bytes);
  }
  static JAX_LAYOUT_INLINE Reg Load(const char* p) {
    return _mm_loadu_si128(reinterpret_cast<const Reg*>(p));
  }
  // Bytes of v into those of `to` whose index has the high bit set.
  static JAX_LAYOUT_INLINE Reg Shuffle(Reg to, const uint8_t* index, Reg v) {
    const Reg k = _mm_load_si128(reinterpret_cast<const Reg*>(index));
    return _mm_or_si128(
        to, _mm_shuffle_epi8(v, _mm_xor_si128(k, _mm_set1_epi8(-128))));
  }
};

}  // namespace

const PermuteFunctions kPermuteAvx2 = {
    32,
    16,
    {TransposeBlock<Avx2, 1>, TransposeBlock<Avx2, 2>, TransposeBlock<Avx2, 4>,
     TransposeBlock<Avx2, 8>, TransposeBlock<Avx2, 16>},
    {},
    MoveBlock<Avx2>,
    CopyBlock<Avx2>,
    RunShuffle<Ssse3>,
};

}  // namespace jax_layout
#endif  // __x86_64__
