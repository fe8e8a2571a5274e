// SPDX-License-Identifier: Apache-2.0
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
#include "cpu/attention/pairs.h"
#include "cpu/vectors/avx512_bf16.h"

namespace jax_layout {
namespace {

// Pairs of few queries: of features of a key, and of keys of a feature. Sums of
// values come in the order in which unpacking leaves features.
struct FewPairs : FewOfPairs {
  static constexpr bool kAtOnce = false;

  static JAX_LAYOUT_INLINE __m512i Load(const void* p) {
    return _mm512_loadu_si512(p);
  }

  static void Copy(const BF16* from, int64_t features, float, float* q,
                   int64_t r, int64_t wide) {
    std::memcpy(q + r * wide, from, features * sizeof(BF16));
  }
  template <int kRows, class R>
  static void Scores(const float* q, int64_t wide, const BF16* k, const R& rows,
                     int64_t count, int64_t features, float factor,
                     AheadOfRows<BF16, R>* ahead, int64_t lines,
                     float* scores) {
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
            to = MultiplyAddPairs(to, left[r], right);
          }
        }
      }
      StoreSums<Floats, kRows>(Floats::Set(factor) * Floats::SumOfEach(sum),
                               scores + j);
    }
  }
  template <int kRows, class R>
  static void Values(const float* powers, const BF16* v, const R& rows,
                     int64_t count, int64_t features, const float* factors,
                     AheadOfRows<BF16, R>* ahead, int64_t lines, float* sums,
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
                  int64_t count, const float* factors,
                  AheadOfRows<BF16, R>* ahead, int64_t lines, float* sums,
                  int64_t wide) {
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
      __m512i left[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        left[r] =
            _mm512_castps_si512(Floats::Set(powers[r * kStripLd + j / 2]));
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) {
        ahead->Ask(2 * lines);
        const __m512i a = Load(one + i * 32), b = Load(other + i * 32);
        const __m512i low = _mm512_unpacklo_epi16(a, b);
        const __m512i high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          __m512* to = sum[r] + 2 * i;
          to[0] = MultiplyAddPairs(to[0], left[r], low);
          to[1] = MultiplyAddPairs(to[1], left[r], high);
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
};

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
