// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CORE_ACTIVATION_H_
#define JAX_LAYOUT_CORE_ACTIVATION_H_

namespace jax_layout {

// Gelu is the tanh approximation, of jax.nn.gelu and of cuBLASLt.
enum class Activation { kNone, kRelu, kGelu };

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_ACTIVATION_H_
