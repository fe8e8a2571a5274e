// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_MOMENTS_MOMENTS_H_
#define JAX_LAYOUT_CPU_MOMENTS_MOMENTS_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// Sums over parts of x, which is dense and of shape (b, r, k, s, l): over r and
// s. Results have shape (b, k, l), and dtype float64 for float64, else float32.
struct MomentsProblem {
  int64_t b = 1, r = 1, k = 1, s = 1, l = 1;
  DType type = DType::kF32;
};

// Mean and variance. x must not be empty.
Status Moments(const MomentsProblem& problem, const void* x, void* mean,
               void* variance, const Executor& executor);

// sum = the sum of ct, product = the sum of ct * (x - center); ct is shaped and
// typed as x, center as a result.
Status CenteredSums(const MomentsProblem& problem, const void* ct,
                    const void* x, const void* center, void* sum, void* product,
                    const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_MOMENTS_MOMENTS_H_
