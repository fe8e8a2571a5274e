// SPDX-License-Identifier: Apache-2.0
//
// Nothing moves: the identity, and permutes that only touch unit axes.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

inline constexpr int kCopyThreads = 128;
inline constexpr int kCopyInFlight = 8;
inline constexpr int kCopySpan = kCopyThreads * kCopyInFlight;  // units

inline int64_t CopyBlocks(const CopyParams& p) {
  return (p.size / p.unit + kCopySpan - 1) / kCopySpan + (p.size < p.unit);
}

// Launch: 1-D; a block copies kCopySpan units, eight per thread, whose loads go
// out together as far as 32 registers hold them: a full multiprocessor has more
// in flight than its share of memory bandwidth needs. Block 0 also copies what
// is less than a unit.
template <int kUnit>
__global__ __launch_bounds__(kCopyThreads) void CopyKernel(
    const __grid_constant__ CopyParams p, const char* __restrict__ x,
    char* __restrict__ y) {
  const int64_t units = p.size / kUnit;
  const int64_t first = int64_t{blockIdx.x} * kCopySpan + threadIdx.x;
  if ((int64_t{blockIdx.x} + 1) * kCopySpan <= units) {
    const char* from = x + first * kUnit;
    char* to = y + first * kUnit;
    Packet<kUnit> held[kCopyInFlight];
#pragma unroll
    for (int k = 0; k < kCopyInFlight; ++k) {
      held[k] = LoadGlobal<kUnit>(from + k * kCopyThreads * kUnit);
    }
#pragma unroll
    for (int k = 0; k < kCopyInFlight; ++k) {
      StoreGlobal<kUnit>(to + k * kCopyThreads * kUnit, held[k]);
    }
  } else {
#pragma unroll 1
    for (int64_t unit = first; unit < units; unit += kCopyThreads) {
      StoreGlobal<kUnit>(y + unit * kUnit, LoadGlobal<kUnit>(x + unit * kUnit));
    }
  }
  if (blockIdx.x == 0) {
    const int64_t byte = units * kUnit + threadIdx.x;
    if (byte < p.size) StoreGlobal<1>(y + byte, LoadGlobal<1>(x + byte));
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_COPY_CUH_
