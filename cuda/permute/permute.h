// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PERMUTE_H_
#define JAX_LAYOUT_CUDA_PERMUTE_PERMUTE_H_

#include <cuda_runtime_api.h>

#include <variant>

#include "core/permute/plan.h"
#include "core/status.h"
#include "cuda/permute/params.h"

namespace jax_layout {

// A plan with what this backend decides once per (shape, axes, itemsize): the
// kernel family, and all that its kernel receives.
struct PermuteKernel {
  PermutePlan plan;
  std::variant<CopyParams, RowsParams<uint32_t>, RowsParams<uint64_t>,
               TileParams, PackedParams>
      params;
};

// `alignment` is what both pointers will be multiples of: at least the power of
// two in itemsize. XLA's buffers have 16 and more.
PermuteKernel ChoosePermuteKernel(const PermutePlan& plan, int alignment = 16);

// Enqueues the permute of x to y on the stream; both hold plan.size > 0 bytes
// and do not overlap.
Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               cudaStream_t stream);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PERMUTE_H_
