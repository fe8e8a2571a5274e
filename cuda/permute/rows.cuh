// SPDX-License-Identifier: Apache-2.0
//
// The innermost axis stays: y is a sequence of whole rows of x.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_ROWS_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

// Small blocks end together; large ones where they would be too many.
template <typename UInt>
inline constexpr int kRowsThreads = sizeof(UInt) == 4 ? 128 : 512;
inline constexpr int kRowsInFlight = 4;

// Units that a thread of RowWordsKernel has in flight: 4 words of bytes, 8 of
// halves.
inline constexpr int kNarrowInFlight = 16;

template <typename UInt>
RowsParams<UInt> PlanRows(const PermutePlan& plan, int unit, bool words) {
  const int64_t length = plan.chunk / unit;
  RowsParams<UInt> p = {};
  p.unit = unit;
  p.words = words;
  p.units = static_cast<UInt>(plan.size / unit);
  p.rows = static_cast<UInt>(plan.size / plan.chunk);
  p.length = FastDivider<UInt>(static_cast<UInt>(length));
  for (int d = plan.rank - 1; d >= 0; --d) {
    p.dims[p.rank++] = {FastDivider<UInt>(plan.dims[d].extent),
                        static_cast<UInt>(plan.dims[d].x_stride * length)};
  }
  return p;
}

template <typename UInt>
int64_t RowsBlocks(const RowsParams<UInt>& p) {
  const int64_t block =
      kRowsThreads<UInt> * (p.words ? kNarrowInFlight : kRowsInFlight);
  return (static_cast<int64_t>(p.units) + block - 1) / block;
}

// Launch: 1-D; a block writes consecutive units of y, and each thread finds
// where its own are in x. Vectors pass the caches by; of narrower units a row
// shares sectors with the next, which may be asked for later.
template <int kUnit, typename UInt>
__global__ __launch_bounds__(kRowsThreads<UInt>) void RowsKernel(
    const __grid_constant__ RowsParams<UInt> p, const char* __restrict__ x,
    char* __restrict__ y) {
  constexpr int kThreads = kRowsThreads<UInt>;
  const UInt first =
      UInt{blockIdx.x} * (kRowsInFlight * kThreads) + threadIdx.x;
  Packet<kUnit> held[kRowsInFlight];
#pragma unroll
  for (int k = 0; k < kRowsInFlight; ++k) {
    // Past the last unit, that is loaded again: no load waits for a branch.
    UInt unit = first + k * kThreads;
    unit = unit < p.units ? unit : p.units - 1;
    const UInt row = p.length.Quotient(unit);
    const UInt column = unit - row * p.length.divisor;
    const char* from = x + uint64_t{p.Row(row) + column} * kUnit;
    if constexpr (kUnit == 16) {
      held[k] = LoadStreaming<kUnit>(from);
    } else {
      held[k] = LoadGlobal<kUnit>(from);
    }
  }
#pragma unroll
  for (int k = 0; k < kRowsInFlight; ++k) {
    const UInt unit = first + k * kThreads;
    if (unit < p.units) {
      StoreStreaming<kUnit>(y + uint64_t{unit} * kUnit, held[k]);
    }
  }
}

// The same for rows of odd bytes or halves, 64 bytes or more: what is loaded
// unit by unit is stored in words. Of a word that two rows share, the first
// units are of the one and the rest of the next. A warp's span touches fewer
// than 32 rows: lane r finds the r-th, once, and the others ask it by shuffle.
template <int kUnit, typename UInt>
__global__ __launch_bounds__(kRowsThreads<UInt>) void RowWordsKernel(
    const __grid_constant__ RowsParams<UInt> p, const char* __restrict__ x,
    char* __restrict__ y) {
  constexpr int kUnits = 4 / kUnit;  // of a word
  constexpr int kWords = kNarrowInFlight / kUnits;
  const uint32_t lane = threadIdx.x % 32;
  const UInt warp =
      UInt{blockIdx.x} * (kRowsThreads<UInt> / 32) + threadIdx.x / 32;
  const UInt first = warp * (32 * kNarrowInFlight);
  if (first >= p.units) return;  // the whole warp

  const UInt first_row = p.length.Quotient(first);
  const UInt first_column = first - first_row * p.length.divisor;
  const UInt last = first_column + (p.units - 1 - first);
  const UInt row = first_row + lane;
  const UInt start = p.Row(row < p.rows ? row : p.rows - 1);
  Packet<kUnit> held[kWords][kUnits];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    UInt unit = first_column + (32 * k + lane) * kUnits;
    unit = unit < last ? unit : last;
    const UInt r = p.length.Quotient(unit);
    const int64_t left =
        static_cast<int64_t>((r + 1) * p.length.divisor - unit);
    const int at = static_cast<int>(r);
    const auto end = static_cast<int64_t>(__shfl_sync(0xffffffffu, start, at) +
                                          p.length.divisor);
    const auto begin =
        static_cast<int64_t>(__shfl_sync(0xffffffffu, start, at + 1));
    const char* here = x + (end - left) * kUnit;
    const char* next = x + (begin - left) * kUnit;
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
