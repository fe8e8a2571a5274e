// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <vector>

#pragma GCC target("avx2")
#include "cpu/permute/kernels.h"

namespace jax_layout {
namespace {

struct Avx2 {
  using Reg = __m256i;
  static constexpr int kBytes = 32;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE Reg Load(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const Reg*>(p));
  }
  static JAX_LAYOUT_INLINE void Store(char* p, Reg v) {
    _mm256_storeu_si256(reinterpret_cast<Reg*>(p), v);
  }
  static JAX_LAYOUT_INLINE void Stream(char* p, Reg v) {
    _mm256_stream_si256(reinterpret_cast<Reg*>(p), v);
  }
  static JAX_LAYOUT_INLINE void CopyPart(char* y, const char* x,
                                         int64_t bytes) {
    CopyShort(y, x, bytes);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg Low(Reg a, Reg b) {
    if constexpr (W == 1) return _mm256_unpacklo_epi8(a, b);
    if constexpr (W == 2) return _mm256_unpacklo_epi16(a, b);
    if constexpr (W == 4) return _mm256_unpacklo_epi32(a, b);
    if constexpr (W == 8) return _mm256_unpacklo_epi64(a, b);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg High(Reg a, Reg b) {
    if constexpr (W == 1) return _mm256_unpackhi_epi8(a, b);
    if constexpr (W == 2) return _mm256_unpackhi_epi16(a, b);
    if constexpr (W == 4) return _mm256_unpackhi_epi32(a, b);
    if constexpr (W == 8) return _mm256_unpackhi_epi64(a, b);
  }
  static JAX_LAYOUT_INLINE Reg LoadLanes(const char* x, const int64_t* at,
                                         int step) {
    const auto* low = reinterpret_cast<const __m128i*>(x + at[0]);
    const auto* high = reinterpret_cast<const __m128i*>(x + at[step]);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)),
                                   _mm_loadu_si128(high), 1);
  }
  static JAX_LAYOUT_INLINE void TransposeLanes(Reg* r) {
    const Reg low = _mm256_permute2x128_si256(r[0], r[1], 0x20);
    r[1] = _mm256_permute2x128_si256(r[0], r[1], 0x31);
    r[0] = low;
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
