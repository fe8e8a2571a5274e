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

#pragma GCC target("avx2,fma,f16c")
#include "cpu/conv/winograd/steps.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {
namespace {

struct Lanes : Avx2Floats {
  static constexpr int kRows = 6;

  static JAX_LAYOUT_INLINE __m256i Every(int64_t step) {
    return _mm256_mullo_epi32(_mm256_set1_epi32(static_cast<int>(step)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static JAX_LAYOUT_INLINE Reg Gather(const float* p, __m256i steps) {
    return _mm256_i32gather_ps(p, steps, sizeof(float));
  }
};

}  // namespace

constinit const WinogradKernels kWinogradAvx2 = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
