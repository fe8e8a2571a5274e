// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/conv/problem.h"
#include "core/dtype.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/conv/grouped/kernels.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {
namespace {

struct Lanes : Avx2Floats {
  static constexpr int kMost = 12, kMembers = 2;

  template <int n>
  static JAX_LAYOUT_INLINE Reg Repeat(const float* p) {
    if constexpr (n == 2) {
      double both;
      std::memcpy(&both, p, sizeof(both));
      return _mm256_castpd_ps(_mm256_set1_pd(both));
    }
    return Set(*p);
  }
  static JAX_LAYOUT_INLINE Reg Permute(Reg v, const int32_t* order) {
    return _mm256_permutevar8x32_ps(
        v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(order)));
  }
};

}  // namespace

constinit const GroupedKernels kGroupedAvx2 = GroupedKernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
