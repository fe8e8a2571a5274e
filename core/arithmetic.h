// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CORE_ARITHMETIC_H_
#define JAX_LAYOUT_CORE_ARITHMETIC_H_

#include <cstdint>

namespace jax_layout {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The next multiple of b.
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_ARITHMETIC_H_
