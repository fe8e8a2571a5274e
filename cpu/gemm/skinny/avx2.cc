// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/gemm/problem.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/gemm/skinny/kernels.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {
namespace {

struct Avx2Int8 : Pairs<int8_t, 8> {
  using Sum = int32_t;
  using Reg = __m256i;
  using SumReg = __m256i;
  static constexpr int kRegisters = 16;

  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p) {
    return _mm256_cvtepi8_epi16(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p, int n) {
    int8_t all[16] = {};
    std::memcpy(all, p, n);
    return Load(all);
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p, int) { return Load(p); }
  static JAX_LAYOUT_INLINE Reg Joined(const int8_t* row, const int8_t* next) {
    const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row));
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
  }
  static JAX_LAYOUT_INLINE void Keep(uint16_t* p, Reg w) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w);
  }
  static JAX_LAYOUT_INLINE Reg Spread(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return _mm256_set1_epi32(pair);
  }
  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg w, Reg x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
  }
  static JAX_LAYOUT_INLINE Reg Zero() { return _mm256_setzero_si256(); }
  static JAX_LAYOUT_INLINE Reg LoadSums(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static JAX_LAYOUT_INLINE void StoreSums(int32_t* p, Reg v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static JAX_LAYOUT_INLINE void Totals(const Reg* r, int32_t* p) {
    const Reg low = _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]),
                                      _mm256_hadd_epi32(r[2], r[3]));
    const Reg high = _mm256_hadd_epi32(_mm256_hadd_epi32(r[4], r[5]),
                                       _mm256_hadd_epi32(r[6], r[7]));
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p),
        _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                         _mm256_permute2x128_si256(low, high, 0x31)));
  }
};

}  // namespace

void SkinnyAvx2(const SkinnyBlock& block) {
  Skinny<Avx2Floats, Avx2Int8>(block);
}

}  // namespace jax_layout
#endif  // __x86_64__
