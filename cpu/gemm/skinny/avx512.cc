// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/gemm/problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/gemm/skinny/kernels.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

struct Avx512Int8 : Pairs<int8_t, 16> {
  using Sum = int32_t;
  using Reg = __m512i;
  using SumReg = __m512i;
  static constexpr int kRegisters = 32;

  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p) {
    return _mm512_cvtepi8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p, int n) {
    const auto first = static_cast<__mmask32>((uint64_t{1} << n) - 1);
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first, p));
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p) {
    return _mm512_loadu_si512(p);
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p, int) { return Load(p); }
  static JAX_LAYOUT_INLINE Reg Joined(const int8_t* row, const int8_t* next) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(next));
    return _mm512_cvtepi8_epi16(
        _mm256_setr_m128i(_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)));
  }
  static JAX_LAYOUT_INLINE void Keep(uint16_t* p, Reg w) {
    _mm512_storeu_si512(p, w);
  }
  static JAX_LAYOUT_INLINE Reg Spread(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg w, Reg x) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
  }
  static JAX_LAYOUT_INLINE Reg Zero() { return _mm512_setzero_si512(); }
  static JAX_LAYOUT_INLINE Reg LoadSums(const int32_t* p) {
    return _mm512_loadu_si512(p);
  }
  static JAX_LAYOUT_INLINE void StoreSums(int32_t* p, Reg v) {
    _mm512_storeu_si512(p, v);
  }
  static JAX_LAYOUT_INLINE void Totals(const Reg* sums, int32_t* p) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) p[i] = _mm512_reduce_add_epi32(sums[i]);
  }
};

}  // namespace

void SkinnyAvx512(const SkinnyBlock& block) {
  Skinny<Avx512Floats, Avx512Int8>(block);
}

}  // namespace jax_layout
#endif  // __x86_64__
