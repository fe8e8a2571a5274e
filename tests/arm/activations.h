// SPDX-License-Identifier: Apache-2.0
//
// The activations of products and their derivatives, in float64.
#ifndef JAX_LAYOUT_TESTS_ARM_ACTIVATIONS_H_
#define JAX_LAYOUT_TESTS_ARM_ACTIVATIONS_H_

#include <cmath>

#include "core/gemm/problem.h"

namespace jax_layout {

// gelu(z) = z sigmoid(2 u)
inline double GeluSigmoid(double z) {
  const double u = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z);
  return 1 / (1 + std::exp(-2 * u));
}

inline double Activated(Activation activation, double z) {
  if (activation == Activation::kNone) return z;
  if (activation == Activation::kGeluErf) {
    return 0.5 * z * std::erfc(-z / std::sqrt(2.));
  }
  return activation == Activation::kRelu ? (z > 0 ? z : 0) : z * GeluSigmoid(z);
}

inline double Slope(Activation activation, double z) {
  if (activation == Activation::kNone) return 1;
  if (activation == Activation::kRelu) return z > 0;
  const double s = GeluSigmoid(z);
  return s +
         z * s * (1 - s) * 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_ARM_ACTIVATIONS_H_
