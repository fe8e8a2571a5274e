// SPDX-License-Identifier: Apache-2.0
//
// The levels that tests of kernels name, by their index in the tests' ISAS.
#ifndef JAX_LAYOUT_TESTS_ISAS_H_
#define JAX_LAYOUT_TESTS_ISAS_H_

#include "cpu/isa.h"

namespace jax_layout {

inline constexpr Isa kTestedIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

// The highest that this processor has.
inline int BestTestedIsa() {
  int best = 0;
  for (int i = 0; i < 3; ++i) {
    if (kTestedIsas[i] <= BestIsa()) best = i;
  }
  return best;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_ISAS_H_
