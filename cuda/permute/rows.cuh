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
// each lane decodes one: ceil((256 - 1) / 9) + 1 = 30, and of 8 units, of which
// spans begin with a row, 256 / 8 = 32.
inline constexpr int kLongRow = 8;

// Units that a thread of RowWordsKernel has in flight: 4 words of bytes, 8 of
// halves.
inline constexpr int kNarrowInFlight = 16;

template <typename UInt>
RowsParams<UInt> PlanRows(const PermutePlan& plan, int unit, bool words) {
  RowsParams<UInt> p = {};
  p.unit = unit;
  p.words = words;
  // Small blocks end together; large ones where they would be too many.
  const int64_t small = plan.size / unit / (64 * kRowsInFlight);
  p.threads = small < INT32_MAX ? 64 : 256;
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
  const int64_t block =
      int64_t{p.threads} * (p.words ? kNarrowInFlight : kRowsInFlight);
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
    // Past the last unit, that is loaded again: no load waits for a branch.
    const UInt last = first_column + (p.units - 1 - first);
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      UInt unit = first_column + 32 * k + lane;
      unit = unit < last ? unit : last;
      const UInt r = p.length.Quotient(unit);
      const UInt column = unit - r * p.length.divisor;
      const int64_t from = static_cast<int64_t>(
          __shfl_sync(0xffffffffu, static_cast<long long>(row_offset),
                      static_cast<int>(r)));
      held[k] =
          LoadGlobal<kUnit>(x + from + static_cast<int64_t>(column) * kUnit);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      UInt unit = first + 32 * k + lane;
      unit = unit < p.units ? unit : p.units - 1;
      const UInt row = p.length.Quotient(unit);
      const UInt column = unit - row * p.length.divisor;
      int64_t from, unused;
      p.walk.Locate(row, &from, &unused);
      held[k] =
          LoadGlobal<kUnit>(x + from + static_cast<int64_t>(column) * kUnit);
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

// The same for rows of odd bytes or halves, 64 bytes or more: what is loaded
// unit by unit is stored in words. Of a word that two rows share, the first
// units are of the one and the rest of the next.
template <int kUnit, typename UInt>
__global__ __launch_bounds__(256) void RowWordsKernel(
    const __grid_constant__ RowsParams<UInt> p, const char* __restrict__ x,
    char* __restrict__ y) {
  constexpr int kUnits = 4 / kUnit;  // of a word
  constexpr int kWords = kNarrowInFlight / kUnits;
  const uint32_t lane = threadIdx.x % 32;
  const UInt warp = UInt{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const UInt first = warp * (32 * kNarrowInFlight);
  if (first >= p.units) return;  // the whole warp

  const UInt first_row = p.length.Quotient(first);
  const UInt first_column = first - first_row * p.length.divisor;
  const UInt last = first_column + (p.units - 1 - first);
  const UInt row = first_row + lane;
  int64_t row_offset, unused;
  p.walk.Locate(row < p.rows ? row : p.rows - 1, &row_offset, &unused);
  Packet<kUnit> held[kWords][kUnits];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    UInt unit = first_column + (32 * k + lane) * kUnits;
    unit = unit < last ? unit : last;
    const UInt r = p.length.Quotient(unit);
    const int64_t left =
        static_cast<int64_t>((r + 1) * p.length.divisor - unit);
    const int64_t row_bytes = static_cast<int64_t>(p.length.divisor) * kUnit;
    const int at = static_cast<int>(r);
    const char* here =
        x + (row_bytes - left * kUnit) +
        __shfl_sync(0xffffffffu, static_cast<long long>(row_offset), at);
    const char* next =
        x - left * kUnit +
        __shfl_sync(0xffffffffu, static_cast<long long>(row_offset), at + 1);
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
      held[k][b] = LoadGlobal<kUnit>((b < left ? here : next) + b * kUnit);
    }
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const UInt unit = first + (32 * k + lane) * kUnits;
    char* to = y + static_cast<int64_t>(unit) * kUnit;
    if (unit + kUnits <= p.units) {
      Packet<4> word = {};
#pragma unroll
      for (int b = 0; b < kUnits; ++b) {
        word.word[0] |= held[k][b].word[0] << (8 * kUnit * b);
      }
      StoreGlobal<4>(to, word);
    } else {
#pragma unroll
      for (int b = 0; b < kUnits; ++b) {
        if (unit + b < p.units) StoreGlobal<kUnit>(to + b * kUnit, held[k][b]);
      }
    }
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_
