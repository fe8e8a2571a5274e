// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/conv/problem.h"
#include "core/dtype.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/conv/depthwise/last.h"
#include "cpu/conv/depthwise/plane_weights.h"
#include "cpu/conv/depthwise/planes.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {
namespace {

struct Lanes : Avx2Floats {
  static constexpr bool kHalves = true;
  static constexpr bool kMasks = true;
  using Mask = __m256i;

  static JAX_LAYOUT_INLINE __m256i First(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static JAX_LAYOUT_INLINE Mask Range(int64_t lo, int64_t hi) {
    return _mm256_andnot_si256(First(static_cast<int>(lo)),
                               First(static_cast<int>(hi)));
  }
  static JAX_LAYOUT_INLINE Reg LoadMasked(const float* p, Mask mask) {
    return _mm256_maskload_ps(p, mask);
  }
  using Avx2Floats::Load;
  using Avx2Floats::Store;
  static JAX_LAYOUT_INLINE Reg Load(const float* p, int n) {
    return n == kLanes ? Load(p) : _mm256_maskload_ps(p, First(n));
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v, int n) {
    if (n == kLanes) return Store(p, v);
    _mm256_maskstore_ps(p, First(n), v);
  }
  static JAX_LAYOUT_INLINE Reg Reorder(Reg v) {
    return _mm256_castpd_ps(
        _mm256_permute4x64_pd(_mm256_castps_pd(v), _MM_SHUFFLE(3, 1, 2, 0)));
  }
  static JAX_LAYOUT_INLINE Reg Even(Reg a, Reg b) {
    return Reorder(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
  }
  static JAX_LAYOUT_INLINE void Split(Reg a, Reg b, Reg* even, Reg* odd) {
    *even = Reorder(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
    *odd = Reorder(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
  }
  static JAX_LAYOUT_INLINE void Merge(Reg even, Reg odd, Reg* a, Reg* b) {
    const Reg lo = _mm256_unpacklo_ps(even, odd);
    const Reg hi = _mm256_unpackhi_ps(even, odd);
    *a = _mm256_permute2f128_ps(lo, hi, 0x20);
    *b = _mm256_permute2f128_ps(lo, hi, 0x31);
  }
};

}  // namespace

constinit const DepthwiseKernels kDepthwiseAvx2 = {
    Lanes::kLanes,     Last<Lanes>,         LastWeights<Lanes>,
    Planes<Lanes>,     PlaneWeights<Lanes>, SumLanes<Lanes>,
    ReadFloats<Lanes>, WriteFloats<Lanes>};

}  // namespace jax_layout
#endif  // __x86_64__
