// SPDX-License-Identifier: Apache-2.0
//
// The innermost axis stays: y is a sequence of whole rows of x.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

inline constexpr int kRowsInFlight = 8;
inline constexpr int kRowsPerWarp = 32 * kRowsInFlight;  // units

// Units of a row from which a warp's span touches at most 32 rows, so that
// each lane decodes one: ceil((256 - 1) / 9) + 1 = 30.
inline constexpr int kLongRow = 9;

template <typename UInt>
RowsParams<UInt> PlanRows(const PermutePlan& plan, int unit) {
  RowsParams<UInt> p = {};
  p.unit = unit;
  p.threads = plan.size < kSmallBytes ? 64 : 256;
  p.units = static_cast<UInt>(plan.size / unit);
  p.rows = static_cast<UInt>(plan.size / plan.chunk);
  p.length = FastDivider<UInt>(static_cast<UInt>(plan.chunk / unit));
  for (int d = plan.rank - 1; d >= 0; --d) {
    p.walk.Append(plan.dims[d].extent, 1, plan.dims[d].x_stride * plan.chunk,
                  plan.dims[d].y_stride * plan.chunk);
  }
  return p;
}

template <typename UInt>
int64_t RowsBlocks(const RowsParams<UInt>& p) {
  const int64_t block = int64_t{p.threads} * kRowsInFlight;
  return (static_cast<int64_t>(p.units) + block - 1) / block;
}

// Launch: 1-D; a warp writes kRowsPerWarp consecutive units of y, each lane
// every 32nd. Lane r decodes the r-th row that the span touches, once, and the
// others ask it by shuffle; rows shorter than kLongRow have about as many
// decodes as units, so there each lane decodes for itself.
template <int kUnit, typename UInt, bool kLong>
__global__ __launch_bounds__(256) void RowsKernel(
    const __grid_constant__ RowsParams<UInt> p, const char* __restrict__ x,
    char* __restrict__ y) {
  const uint32_t lane = threadIdx.x % 32;
  const UInt warp = UInt{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const UInt first = warp * kRowsPerWarp;
  if (first >= p.units) return;  // the whole warp

  Packet<kUnit> held[kRowsInFlight];
  if constexpr (kLong) {
    const UInt first_row = p.length.Quotient(first);
    const UInt first_column = first - first_row * p.length.divisor;
    const UInt row = first_row + lane;
    int64_t row_offset, unused;
    p.walk.Locate(row < p.rows ? row : p.rows - 1, &row_offset, &unused);
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const UInt unit = first_column + 32 * k + lane;
      const UInt r = p.length.Quotient(unit);
      const UInt column = unit - r * p.length.divisor;
      const int64_t from = static_cast<int64_t>(
          __shfl_sync(0xffffffffu, static_cast<long long>(row_offset),
                      static_cast<int>(r)));
      if (first + 32 * k + lane < p.units) {
        held[k] =
            LoadGlobal<kUnit>(x + from + static_cast<int64_t>(column) * kUnit);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const UInt unit = first + 32 * k + lane;
      if (unit < p.units) {
        const UInt row = p.length.Quotient(unit);
        const UInt column = unit - row * p.length.divisor;
        int64_t from, unused;
        p.walk.Locate(row, &from, &unused);
        held[k] =
            LoadGlobal<kUnit>(x + from + static_cast<int64_t>(column) * kUnit);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kRowsInFlight; ++k) {
    const UInt unit = first + 32 * k + lane;
    if (unit < p.units) {
      StoreGlobal<kUnit>(y + static_cast<int64_t>(unit) * kUnit, held[k]);
    }
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_
