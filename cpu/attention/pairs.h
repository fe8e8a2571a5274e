// SPDX-License-Identifier: Apache-2.0
//
// Pairs of bf16 (cpu/vectors/avx512_bf16.h). Powers and their gradients are
// rounded to bf16, as jax's are.
#ifndef JAX_LAYOUT_CPU_ATTENTION_PAIRS_H_
#define JAX_LAYOUT_CPU_ATTENTION_PAIRS_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/attention/tiles.h"
#include "cpu/vectors/avx512_bf16.h"

namespace jax_layout {
namespace {

using Floats = Avx512Floats;

struct Pairs {
  static constexpr int64_t kDepth = 2, kStep = kDepth, kAcrossRow = 1;
  static constexpr bool kFactors = false;

  static JAX_LAYOUT_INLINE __m512 MultiplyAdd(__m512 sum, __m512 left,
                                              __m512 right) {
    return MultiplyAddPairs(sum, _mm512_castps_si512(left),
                            _mm512_castps_si512(right));
  }
  static JAX_LAYOUT_INLINE __m512 Join(__m256i a, __m256i b) {
    return _mm512_castsi512_ps(JoinPairs(a, b));
  }
  static JAX_LAYOUT_INLINE __m256i Load(const BF16* p, int n) {
    return _mm256_maskz_loadu_epi16(Floats::First(n), p);
  }
  static JAX_LAYOUT_INLINE __m256i Narrow(__m512 v) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
  }

  // Pairs of features are moved as if they were floats.
  static void PackTransposed(const BF16* from, int64_t ld, int64_t rows,
                             int64_t features, float* to) {
    Widened<Floats>::PackTransposed(reinterpret_cast<const float*>(from),
                                    ld / 2, rows, features / 2, to);
  }
  static void CopyRows(const BF16* from, int64_t ld, int64_t rows,
                       int64_t features, float, float* to) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * kLd, from + i * ld, features * sizeof(BF16));
    }
  }
  static void PackRows(const BF16* from, int64_t ld, int64_t rows,
                       int64_t features, float* to, int64_t panel) {
    for (int64_t i = 0; i < rows; i += 2) {
      for (int64_t j = 0; j < features; j += 16) {
        const int n = static_cast<int>(Least(16, features - j));
        const BF16* at = from + i * ld + j;
        const __m256i second =
            i + 1 < rows ? Load(at + ld, n) : _mm256_setzero_si256();
        Floats::Store(to + j / kCols<Floats> * panel + i / 2 * kCols<Floats> +
                          j % kCols<Floats>,
                      Join(Load(at, n), second));
      }
    }
  }
  // What is written lies before what is still to be read.
  static void NarrowRow(float* row, int64_t begin, int64_t end) {
    for (int64_t j = begin / 16 * 16; j < end; j += 16) {
      const __m256i narrow = Narrow(Floats::Load(row + j));
      std::memcpy(reinterpret_cast<char*>(row) + 2 * j, &narrow,
                  sizeof(narrow));
    }
  }
  static const float* NarrowAcross(const float* rows, int64_t count,
                                   int64_t begin, int64_t end, float* to) {
    for (int64_t i = 0; i < count; i += 2) {
      for (int64_t j = begin / 16 * 16; j < end; j += 16) {
        const float* at = rows + i * kLd + j;
        const __m512 second =
            i + 1 < count ? Floats::Load(at + kLd) : Floats::Zero();
        Floats::Store(to + i / 2 * kLd + j,
                      Join(Narrow(Floats::Load(at)), Narrow(second)));
      }
    }
    return to;
  }
};

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_PAIRS_H_
