// SPDX-License-Identifier: Apache-2.0
//
// Blocks of pairs of bf16.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/gemm/problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")
#include "cpu/gemm/blocked/kernels.h"
#include "cpu/vectors/avx512_bf16.h"

namespace jax_layout {
namespace {

struct PairsOfBf16 : Avx512Floats {
  static constexpr int64_t kDepth = 2;

  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg left, Reg right) {
    return MultiplyAddPairs(sum, _mm512_castps_si512(left),
                            _mm512_castps_si512(right));
  }
  static JAX_LAYOUT_INLINE Reg LoadAcross(const BF16* p, int64_t ld,
                                          int64_t rows, int lanes) {
    const __m256i first = _mm256_maskz_loadu_epi16(First(lanes), p);
    const __m256i second = rows == 1
                               ? _mm256_setzero_si256()
                               : _mm256_maskz_loadu_epi16(First(lanes), p + ld);
    return _mm512_castsi512_ps(JoinPairs(first, second));
  }
  static JAX_LAYOUT_INLINE Reg LoadAlong(const BF16* p, int count) {
    const auto first = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first, p));
  }
};

}  // namespace

const BlockedKernels kBlockedAvx512Bf16 = kBlocked<PairsOfBf16>;

}  // namespace jax_layout
#endif  // __x86_64__
