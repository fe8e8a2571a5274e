// SPDX-License-Identifier: Apache-2.0
#include "cpu/floats.h"

namespace jax_layout {

Floats BestFloats() {
#ifdef __x86_64__
  static const Floats best = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
      return Floats::kNone;
    }
    return __builtin_cpu_supports("avx512f") &&
                   __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl")
               ? Floats::kAvx512
               : Floats::kAvx2;
  }();
  return best;
#else
  return Floats::kNone;
#endif
}

}  // namespace jax_layout
