// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/conv_problem.h"
#include "core/gemm_problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/conv_depthwise_kernels.h"
#include "cpu/gemm_avx512.h"

namespace jax_layout {
namespace {

struct Lanes : Avx512Floats {
  static constexpr bool kHalves = true;

  static JAX_LAYOUT_INLINE void Split(Reg a, Reg b, Reg* even, Reg* odd) {
    const __m512i i = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20,
                                        22, 24, 26, 28, 30);
    *even = _mm512_permutex2var_ps(a, i, b);
    *odd =
        _mm512_permutex2var_ps(a, _mm512_add_epi32(i, _mm512_set1_epi32(1)), b);
  }
  static JAX_LAYOUT_INLINE void Merge(Reg even, Reg odd, Reg* a, Reg* b) {
    const __m512i i = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                        21, 6, 22, 7, 23);
    *a = _mm512_permutex2var_ps(even, i, odd);
    *b = _mm512_permutex2var_ps(even, _mm512_add_epi32(i, _mm512_set1_epi32(8)),
                                odd);
  }
};

}  // namespace

constinit const DepthwiseKernels kDepthwiseAvx512 = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
