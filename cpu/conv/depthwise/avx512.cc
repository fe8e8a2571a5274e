// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/conv/problem.h"
#include "core/dtype.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/conv/depthwise/last.h"
#include "cpu/conv/depthwise/plane_weights.h"
#include "cpu/conv/depthwise/planes.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

struct Lanes : Avx512Floats {
  static constexpr bool kHalves = true;
  static constexpr bool kMasks = true;
  using Mask = __mmask16;

  static JAX_LAYOUT_INLINE Mask Range(int64_t lo, int64_t hi) {
    return static_cast<Mask>((1u << hi) - (1u << lo));
  }
  static JAX_LAYOUT_INLINE Reg LoadMasked(const float* p, Mask mask) {
    return _mm512_maskz_loadu_ps(mask, p);
  }

  static JAX_LAYOUT_INLINE Reg Even(Reg a, Reg b) {
    return _mm512_permutex2var_ps(
        a,
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                          30),
        b);
  }
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

constinit const DepthwiseKernels kDepthwiseAvx512 = {
    Lanes::kLanes,     Last<Lanes>,         LastWeights<Lanes>,
    Planes<Lanes>,     PlaneWeights<Lanes>, SumLanes<Lanes>,
    ReadFloats<Lanes>, WriteFloats<Lanes>};

}  // namespace jax_layout
#endif  // __x86_64__
