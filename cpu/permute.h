// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_PERMUTE_H_
#define JAX_LAYOUT_CPU_PERMUTE_H_

#include "core/permute_plan.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// A plan with what this backend decides once per (shape, axes, itemsize).
struct PermuteKernel {
  PermutePlan plan;
};

PermuteKernel ChoosePermuteKernel(const PermutePlan& plan);

// Writes the permuted x to y; both hold plan.size > 0 bytes and do not overlap.
Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PERMUTE_H_
