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
#include "cpu/conv/grouped/kernels.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

struct Lanes : Avx512Floats {
  static constexpr int kMost = 16, kMembers = 4;

  template <int n>
  static JAX_LAYOUT_INLINE Reg Repeat(const float* p) {
    if constexpr (n == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    if constexpr (n == 2) {
      double both;
      std::memcpy(&both, p, sizeof(both));
      return _mm512_castpd_ps(_mm512_set1_pd(both));
    }
    return Set(*p);
  }
  static JAX_LAYOUT_INLINE Reg Permute(Reg v, const int32_t* order) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(order), v);
  }
};

}  // namespace

constinit const GroupedKernels kGroupedAvx512 = GroupedKernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
