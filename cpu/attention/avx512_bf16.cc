// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 two at a time, which is twice as fast as in f32. Powers and
// their gradients are rounded to bf16, as jax's are; denormals count as zero.
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/attention/kernels.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")
#include "cpu/attention/backward.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

using Floats = Avx512Floats;

// Two of bf16 in the place of a float, the first in the lower half.
struct Pairs {
  static constexpr int64_t kDepth = 2;
  static constexpr bool kFactors = false;

  static JAX_LAYOUT_INLINE __m512 MultiplyAdd(__m512 sum, __m512 left,
                                              __m512 right) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left),
                            reinterpret_cast<__m512bh>(right));
  }
  // Lanes of a below those of b.
  static JAX_LAYOUT_INLINE __m512 Join(__m256i a, __m256i b) {
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                        _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
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

// The same of few queries: pairs of features of a key, and of keys of a
// feature. Sums of values come in the order in which unpacking leaves features.
struct FewPairs {
  using T = BF16;

  static JAX_LAYOUT_INLINE __m512i Load(const void* p) {
    return _mm512_loadu_si512(p);
  }
  static JAX_LAYOUT_INLINE __m512 MultiplyAdd(__m512 sum, __m512i left,
                                              __m512i right) {
    return Pairs::MultiplyAdd(sum, _mm512_castsi512_ps(left),
                              _mm512_castsi512_ps(right));
  }

  static void Copy(const BF16* from, int64_t features, float, float* to) {
    std::memcpy(to, from, features * sizeof(BF16));
  }
  template <int kRows, class R>
  static void Scores(const float* q, int64_t wide, const BF16* k, const R& rows,
                     int64_t count, int64_t features, float factor,
                     Ahead<BF16, R>* ahead, int64_t lines, float* scores) {
    constexpr int kKeysAtOnce = 16 / kRows;
    const int64_t asked = lines * 4 * 32 / features;
    for (int64_t j = 0; j < count; j += kKeysAtOnce) {
      const BF16* row[kKeysAtOnce];
      __m512 sum[16];
#pragma GCC unroll 16
      for (int i = 0; i < kKeysAtOnce; ++i) {
        row[i] = k + rows.At(Least(j + i, count - 1));
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sum[i] = Floats::Zero();
      for (int64_t h = 0; h < features; h += 32) {
        __m512i left[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) left[r] = Load(q + r * wide + h / 2);
#pragma GCC unroll 16
        for (int i = 0; i < kKeysAtOnce; ++i) {
          if (i % 4 == 0) ahead->Ask(asked);
          const __m512i right = Load(row[i] + h);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            __m512& to = sum[r * kKeysAtOnce + i];
            to = MultiplyAdd(to, left[r], right);
          }
        }
      }
      StoreSums<Floats, kRows>(Floats::Set(factor) * Floats::SumOfEach(sum),
                               scores + j);
    }
  }
  // The last of an odd number has no partner.
  static void Narrow(float* row, int64_t count) {
    if (count % 2 != 0) row[count] = 0;
    Pairs::NarrowRow(row, 0, count);
  }
  template <int kRows, class R>
  static void Values(const float* powers, const BF16* v, const R& rows,
                     int64_t count, int64_t features, const float* factors,
                     Ahead<BF16, R>* ahead, int64_t lines, float* sums,
                     int64_t wide) {
    constexpr int kBlocks = kRows == 4 ? 2 : 4;
    const int64_t asked = lines * 32 / features;  // of each block
    int64_t h = 0;
    for (; h + 32 * kBlocks <= features; h += 32 * kBlocks) {
      Sum<kRows, kBlocks>(powers, v + h, rows, count, factors, ahead, asked,
                          sums + h, wide);
    }
    for (; h < features; h += 32) {
      Sum<kRows, 1>(powers, v + h, rows, count, factors, ahead, asked, sums + h,
                    wide);
    }
  }
  // Of kBlocks of 32 features.
  template <int kRows, int kBlocks, class R>
  static void Sum(const float* powers, const BF16* v, const R& rows,
                  int64_t count, const float* factors, Ahead<BF16, R>* ahead,
                  int64_t lines, float* sums, int64_t wide) {
    __m512 sum[kRows][2 * kBlocks];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kBlocks; ++i) {
        sum[r][i] =
            Floats::Load(sums + r * wide + i * 16) * Floats::Set(factors[r]);
      }
    }
    for (int64_t j = 0; j < count; j += 2) {
      const BF16* one = v + rows.At(j);
      const BF16* other = v + rows.At(Least(j + 1, count - 1));
      __m512 left[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        left[r] = Floats::Set(powers[r * kStripLd + j / 2]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) {
        ahead->Ask(2 * lines);
        const __m512i a = Load(one + i * 32), b = Load(other + i * 32);
        const __m512 low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
        const __m512 high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          __m512* to = sum[r] + 2 * i;
          to[0] = Pairs::MultiplyAdd(to[0], left[r], low);
          to[1] = Pairs::MultiplyAdd(to[1], left[r], high);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kBlocks; ++i) {
        Floats::Store(sums + r * wide + i * 16, sum[r][i]);
      }
    }
  }
  // Of 32 features, the first have quarters of 0 to 3, 8 to 11, and so on.
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

bool InPairs(const AttentionProblem& p) {
  return p.type == DType::kBF16 && p.features % 2 == 0 && p.q.row % 2 == 0 &&
         p.k.row % 2 == 0;
}

void ForwardPairs(const AttentionTask& task) {
  if (!InPairs(task.problem)) return Forward<Floats>(task);
  ForwardOf<Floats, Pairs, BF16>(task);
}

void BackwardPairs(const AttentionGradientTask& task) {
  if (!InPairs(task.problem)) return Backward<Floats>(task);
  BackwardOf<Floats, Pairs, BF16>(task);
}

void FewInPairs(const AttentionFewTask& task) {
  const AttentionProblem& p = task.problem;
  if (p.type != DType::kBF16 || p.features % 32 != 0) return Few<Floats>(task);
  FewOf<Floats, FewPairs>(task);
}

}  // namespace

const AttentionKernels kAttentionAvx512Bf16 =
    kAttention<Floats, ForwardPairs, BackwardPairs, FewInPairs>;

}  // namespace jax_layout
#endif  // __x86_64__
