// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CUDA_PERMUTE_H_
#define JAX_LAYOUT_CUDA_PERMUTE_H_

#include <cuda_runtime_api.h>

#include "core/permute_plan.h"
#include "core/status.h"

namespace jax_layout {

// A plan with what this backend decides once per (shape, axes, itemsize).
struct PermuteKernel {
  PermutePlan plan;
};

PermuteKernel ChoosePermuteKernel(const PermutePlan& plan);

// Enqueues the permute of x to y on the stream; both hold plan.size > 0 bytes
// and do not overlap.
Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               cudaStream_t stream);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_H_
