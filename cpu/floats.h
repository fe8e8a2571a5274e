// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_FLOATS_H_
#define JAX_LAYOUT_CPU_FLOATS_H_

namespace jax_layout {

// Instruction sets for sums of floats, each including the ones before it.
enum class Floats { kNone, kAvx2, kAvx512 };

// The best one that this processor and this build offer.
Floats BestFloats();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_FLOATS_H_
