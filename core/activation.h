// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CORE_ACTIVATION_H_
#define JAX_LAYOUT_CORE_ACTIVATION_H_

namespace jax_layout {

// Gelu is the tanh approximation, of jax.nn.gelu and of cuBLASLt; GeluErf the
// exact one, of the error function.
enum class Activation { kNone, kRelu, kGelu, kGeluErf };

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_ACTIVATION_H_
