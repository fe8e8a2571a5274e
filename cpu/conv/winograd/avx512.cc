// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "core/float16.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/conv/winograd/steps.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

struct Lanes : Avx512Floats {
  static constexpr int kRows = 12;

  static JAX_LAYOUT_INLINE __m512i Every(int64_t step) {
    return _mm512_mullo_epi32(_mm512_set1_epi32(static_cast<int>(step)),
                              _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                10, 11, 12, 13, 14, 15));
  }
  static JAX_LAYOUT_INLINE Reg Gather(const float* p, __m512i steps) {
    return _mm512_i32gather_ps(steps, p, sizeof(float));
  }
};

}  // namespace

constinit const WinogradKernels kWinogradAvx512 = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
