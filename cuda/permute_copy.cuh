// SPDX-License-Identifier: Apache-2.0
//
// Nothing moves: the identity, and permutes that only touch unit axes.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_

#include "cuda/permute_params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

inline constexpr int kCopyInFlight = 8;

inline CopyParams PlanCopy(const PermutePlan& plan, int alignment) {
  return {alignment, plan.size < kSmallBytes ? 64 : 256, plan.size};
}

inline int64_t CopyBlocks(const CopyParams& p) {
  const int64_t block = int64_t{p.threads} * kCopyInFlight * p.unit;
  return (p.size + block - 1) / block;
}

// Launch: 1-D; a block copies kCopyInFlight * blockDim.x units, all loads of a
// thread before its first store. Block 0 also copies what is less than a unit.
template <int kUnit>
__global__ __launch_bounds__(256) void CopyKernel(
    const __grid_constant__ CopyParams p, const char* __restrict__ x,
    char* __restrict__ y) {
  const int64_t units = p.size / kUnit;
  const int64_t first =
      int64_t{blockIdx.x} * (kCopyInFlight * blockDim.x) + threadIdx.x;
  Packet<kUnit> held[kCopyInFlight];
#pragma unroll
  for (int k = 0; k < kCopyInFlight; ++k) {
    const int64_t unit = first + k * blockDim.x;
    if (unit < units) held[k] = LoadGlobal<kUnit>(x + unit * kUnit);
  }
#pragma unroll
  for (int k = 0; k < kCopyInFlight; ++k) {
    const int64_t unit = first + k * blockDim.x;
    if (unit < units) StoreGlobal<kUnit>(y + unit * kUnit, held[k]);
  }
  if (blockIdx.x == 0) {
    const int64_t byte = units * kUnit + threadIdx.x;
    if (byte < p.size) StoreGlobal<1>(y + byte, LoadGlobal<1>(x + byte));
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
