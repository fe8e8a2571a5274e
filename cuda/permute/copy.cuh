// SPDX-License-Identifier: Apache-2.0
//
// Nothing moves: the identity, and permutes that only touch unit axes.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

inline constexpr int kCopyThreads = 256;

inline int64_t CopyBlocks(const CopyParams& p) {
  return (p.size / p.unit + kCopyThreads - 1) / kCopyThreads +
         (p.size < p.unit);
}

// Launch: 1-D; a thread copies a unit: a full multiprocessor has more in flight
// than its share of memory bandwidth needs, and small blocks end together.
// Block 0 also copies what is less than a unit.
template <int kUnit>
__global__ __launch_bounds__(kCopyThreads) void CopyKernel(
    const __grid_constant__ CopyParams p, const char* __restrict__ x,
    char* __restrict__ y) {
  const int64_t units = p.size / kUnit;
  const int64_t unit = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (unit < units) {
    StoreGlobal<kUnit>(y + unit * kUnit, LoadGlobal<kUnit>(x + unit * kUnit));
  }
  if (blockIdx.x == 0) {
    const int64_t byte = units * kUnit + threadIdx.x;
    if (byte < p.size) StoreGlobal<1>(y + byte, LoadGlobal<1>(x + byte));
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
