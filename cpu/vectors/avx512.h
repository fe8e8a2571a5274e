// SPDX-License-Identifier: Apache-2.0
//
// Vectors of f32 in AVX-512, as epilogue.h describes them, for the source
// files that are compiled for it.
#include <immintrin.h>

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

struct Avx512Floats {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  static constexpr int kTileRows = 14, kTileVectors = 2;
  static constexpr int kPrefetch = 8;
  static constexpr bool kMasks = true;

  static JAX_LAYOUT_INLINE Reg Zero() { return _mm512_setzero_ps(); }
  static JAX_LAYOUT_INLINE Reg Set(float x) { return _mm512_set1_ps(x); }
  static JAX_LAYOUT_INLINE __mmask16 First(int n) {
    return static_cast<__mmask16>((1u << n) - 1);
  }
  static JAX_LAYOUT_INLINE Reg Widen(__m256i bf16) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  }
  static JAX_LAYOUT_INLINE Reg Load(const float* p) {
    return _mm512_loadu_ps(p);
  }
  static JAX_LAYOUT_INLINE Reg Load(const BF16* p) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static JAX_LAYOUT_INLINE Reg Load(const F16* p) {
    return _mm512_cvtph_ps(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static JAX_LAYOUT_INLINE Reg Load(const float* p, int n) {
    if (n == kLanes) return Load(p);
    return _mm512_maskz_loadu_ps(First(n), p);
  }
  static JAX_LAYOUT_INLINE Reg Load(const BF16* p, int n) {
    if (n == kLanes) return Load(p);
    return Widen(_mm256_maskz_loadu_epi16(First(n), p));
  }
  static JAX_LAYOUT_INLINE Reg Load(const F16* p, int n) {
    if (n == kLanes) return Load(p);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(First(n), p));
  }
  // To the nearest even. The processor's own instruction would flush
  // denormals.
  static JAX_LAYOUT_INLINE __m256i Narrow(Reg v) {
    const __m512i x = _mm512_castps_si512(v);
    const __m512i odd =
        _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    __m512i r =
        _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                              _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
  }
  static JAX_LAYOUT_INLINE __m256i Half(Reg v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v) {
    _mm512_storeu_ps(p, v);
  }
  static JAX_LAYOUT_INLINE void Store(BF16* p, Reg v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Narrow(v));
  }
  static JAX_LAYOUT_INLINE void Store(F16* p, Reg v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Half(v));
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v, int n) {
    _mm512_mask_storeu_ps(p, First(n), v);
  }
  static JAX_LAYOUT_INLINE void Store(BF16* p, Reg v, int n) {
    _mm256_mask_storeu_epi16(p, First(n), Narrow(v));
  }
  static JAX_LAYOUT_INLINE void Store(F16* p, Reg v, int n) {
    _mm256_mask_storeu_epi16(p, First(n), Half(v));
  }
  static JAX_LAYOUT_INLINE Reg Max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static JAX_LAYOUT_INLINE Reg Min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static JAX_LAYOUT_INLINE Reg WherePositive(Reg x, Reg z) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, Zero(), _CMP_GT_OQ), z);
  }
  static JAX_LAYOUT_INLINE Reg Round(Reg v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT);
  }
  static JAX_LAYOUT_INLINE Reg TimesTwoTo(Reg v, Reg n) {
    return _mm512_scalef_ps(v, n);
  }
  static JAX_LAYOUT_INLINE Reg Reciprocal(Reg v) {
    const Reg r = _mm512_rcp14_ps(v);
    return r * (Set(2.f) - v * r);
  }
  static JAX_LAYOUT_INLINE float Sum(Reg v) { return _mm512_reduce_add_ps(v); }
  static JAX_LAYOUT_INLINE float Largest(Reg v) {
    return _mm512_reduce_max_ps(v);
  }
  static JAX_LAYOUT_INLINE Reg LowPairs(Reg a, Reg b) {
    return _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static JAX_LAYOUT_INLINE Reg HighPairs(Reg a, Reg b) {
    return _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static JAX_LAYOUT_INLINE Reg SumOfEach(const Reg* r) {
    Reg pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]) +
                 _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // Then each quarter has a sum of four vectors' quarters.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      fours[i] = LowPairs(pairs[2 * i], pairs[2 * i + 1]) +
                 HighPairs(pairs[2 * i], pairs[2 * i + 1]);
    }
    const Reg low = _mm512_shuffle_f32x4(fours[0], fours[1], 0x88) +
                    _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
    const Reg high = _mm512_shuffle_f32x4(fours[2], fours[3], 0x88) +
                     _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
    return _mm512_shuffle_f32x4(low, high, 0x88) +
           _mm512_shuffle_f32x4(low, high, 0xdd);
  }
  static JAX_LAYOUT_INLINE void Transpose(Reg* r) {
    Reg t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    // Now r[4 i + j], quarter l: column 4 l + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = LowPairs(t[i], t[i + 2]);
      r[i + 1] = HighPairs(t[i], t[i + 2]);
      r[i + 2] = LowPairs(t[i + 1], t[i + 3]);
      r[i + 3] = HighPairs(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Reg a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
      const Reg b = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
      const Reg c = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
      const Reg d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
      t[j] = _mm512_shuffle_f32x4(a, c, 0x88);
      t[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
      t[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
      t[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
};

}  // namespace
}  // namespace jax_layout
