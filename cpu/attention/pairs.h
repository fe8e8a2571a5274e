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
  // e^x as a power of 2: a polynomial, good to 8e-8, of what x / log 2 has
  // above a whole number. Rounding that costs 6e-8 of it; bf16 is good to 2e-3.
  static JAX_LAYOUT_INLINE __m512 Power(__m512 x) {
    const __m512 n = x * Floats::Set(0x1.715476p+0f);
    const __m512 r =
        _mm512_reduce_ps(n, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = Floats::Set(0x1.e974fcp-10f);
    p = p * r + Floats::Set(0x1.277854p-7f);
    p = p * r + Floats::Set(0x1.c91ce6p-5f);
    p = p * r + Floats::Set(0x1.ebdb56p-3f);
    p = p * r + Floats::Set(0x1.62e4bap-1f);
    p = p * r + Floats::Set(1.f);
    return _mm512_scalef_ps(p, n);
  }
  static float Powers(float* row, const SeenKeys& seen, const SeenKeys& block,
                      float factor, float shift) {
    const __m512 times = Floats::Set(factor), less = Floats::Set(shift);
    __m512 sum[2] = {Floats::Zero(), Floats::Zero()};
    Blank(row, block.begin, seen.begin);
    int64_t j = seen.begin;
    for (; j + 32 <= seen.end; j += 32) {
      __m512 p[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        p[i] = Power(Floats::Load(row + j + i * 16) * times - less);
        sum[i] = sum[i] + p[i];
      }
      const __m512bh both = _mm512_cvtne2ps_pbh(p[1], p[0]);
      std::memcpy(Narrowed(row, j), &both, sizeof(both));
    }
    if (j < seen.end) {
      const __m512 p = Power(Floats::Load(row + j) * times - less);
      sum[0] = sum[0] + p;
      const __m256i narrow = Narrow(p);
      std::memcpy(Narrowed(row, j), &narrow, sizeof(narrow));
    }
    Blank(row, seen.end, block.end);
    return Floats::Sum(sum[0] + sum[1]);
  }
  // Where what is made of a row's float lies: before what is still to be read.
  static JAX_LAYOUT_INLINE char* Narrowed(float* row, int64_t j) {
    return reinterpret_cast<char*>(row) + 2 * j;
  }
  // No powers of keys [begin, end), and of as many more as fill a vector.
  static void Blank(float* row, int64_t begin, int64_t end) {
    for (int64_t j = begin / 16 * 16; j < end; j += 16) {
      std::memset(Narrowed(row, j), 0, 16 * sizeof(BF16));
    }
  }
  static void NarrowRow(float* row, int64_t begin, int64_t end) {
    for (int64_t j = begin / 16 * 16; j < end; j += 16) {
      const __m256i narrow = Narrow(Floats::Load(row + j));
      std::memcpy(Narrowed(row, j), &narrow, sizeof(narrow));
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

// What arithmetics of few queries (few.h) have in common.
struct FewOfPairs {
  using T = BF16;

  // Zero up to a whole step of tiles, and so of pairs.
  static float Powers(float* row, const SeenKeys& seen, int64_t count,
                      float shift) {
    return Pairs::Powers(row, seen, {0, UpTo(count, 32)}, 1, shift);
  }
  // Sums of unpacked values, to the order of features: of 32, the first vector
  // has quarters of 0 to 3, 8 to 11, and so on.
  static void Order(float* sums, int64_t features) {
    for (int64_t h = 0; h < features; h += 32) {
      const __m512d low = _mm512_castps_pd(Floats::Load(sums + h));
      const __m512d high = _mm512_castps_pd(Floats::Load(sums + h + 16));
      const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
      const __m512i last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
      _mm512_storeu_pd(sums + h, _mm512_permutex2var_pd(low, first, high));
      _mm512_storeu_pd(sums + h + 16, _mm512_permutex2var_pd(low, last, high));
    }
  }
};

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_PAIRS_H_
