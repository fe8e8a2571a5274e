// SPDX-License-Identifier: Apache-2.0
//
// Vectors of f32 in AVX2, as epilogue.h describes them, for the source
// files that are compiled for it.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

struct Avx2Floats {
  using Reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr int kTileRows = 6, kTileVectors = 2;
  static constexpr int kPrefetch = 0;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE Reg Zero() { return _mm256_setzero_ps(); }
  static JAX_LAYOUT_INLINE Reg Set(float x) { return _mm256_set1_ps(x); }
  static JAX_LAYOUT_INLINE Reg Widen(__m128i bf16) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
  }
  static JAX_LAYOUT_INLINE Reg Load(const float* p) {
    return _mm256_loadu_ps(p);
  }
  static JAX_LAYOUT_INLINE Reg Load(const BF16* p) {
    return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static JAX_LAYOUT_INLINE Reg Load(const F16* p) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // There are no masks for 16-bit elements: pieces go through a buffer.
  template <class T>
  static JAX_LAYOUT_INLINE Reg Load(const T* p, int n) {
    if (n == kLanes) return Load(p);
    T all[kLanes] = {};
    std::memcpy(all, p, n * sizeof(T));
    return Load(all);
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v) {
    _mm256_storeu_ps(p, v);
  }
  static JAX_LAYOUT_INLINE void Store(BF16* p, Reg v) {
    const __m256i x = _mm256_castps_si256(v);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    __m256i r =
        _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_blendv_epi8(
        r, _mm256_set1_epi32(0x7fc00000),
        _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    r = _mm256_srli_epi32(r, 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(r),
                                      _mm256_extracti128_si256(r, 1)));
  }
  static JAX_LAYOUT_INLINE void Store(F16* p, Reg v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  template <class T>
  static JAX_LAYOUT_INLINE void Store(T* p, Reg v, int n) {
    if (n == kLanes) return Store(p, v);
    T all[kLanes];
    Store(all, v);
    std::memcpy(p, all, n * sizeof(T));
  }
  static JAX_LAYOUT_INLINE Reg Max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static JAX_LAYOUT_INLINE Reg Min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static JAX_LAYOUT_INLINE Reg WherePositive(Reg x, Reg z) {
    return _mm256_and_ps(_mm256_cmp_ps(x, Zero(), _CMP_GT_OQ), z);
  }
  static JAX_LAYOUT_INLINE Reg Round(Reg v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT);
  }
  // In two steps: 2^128 is no f32.
  static JAX_LAYOUT_INLINE Reg TimesTwoTo(Reg v, Reg n) {
    const __m256i all = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(all, 1);
    return v * Power(half) * Power(_mm256_sub_epi32(all, half));
  }
  static JAX_LAYOUT_INLINE Reg Power(__m256i n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static JAX_LAYOUT_INLINE Reg Reciprocal(Reg v) { return Set(1.f) / v; }
  static JAX_LAYOUT_INLINE float Sum(Reg v) {
    __m128 s =
        _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static JAX_LAYOUT_INLINE float Largest(Reg v) {
    __m128 s =
        _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static JAX_LAYOUT_INLINE Reg SumOfEach(const Reg* r) {
    const Reg low =
        _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    const Reg high =
        _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
    return _mm256_permute2f128_ps(low, high, 0x20) +
           _mm256_permute2f128_ps(low, high, 0x31);
  }
  static JAX_LAYOUT_INLINE void Transpose(Reg* r) {
    Reg t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    // Now r[4 i + j], half l: column 4 l + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Reg low = r[j], high = r[4 + j];
      r[j] = _mm256_permute2f128_ps(low, high, 0x20);
      r[4 + j] = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }
};

}  // namespace
}  // namespace jax_layout
