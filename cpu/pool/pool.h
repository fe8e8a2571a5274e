// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_POOL_POOL_H_
#define JAX_LAYOUT_CPU_POOL_POOL_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// The windows along one axis: element i of window j is x[j * stride + i *
// dilation - low], where there is one.
struct Windows {
  int64_t extent = 1, out = 1, size = 1, stride = 1, dilation = 1, low = 0;
};

enum class PoolKind { kSum, kMax };

// Windows of x, which is dense and of shape (outer, extents..., inner), with
// the axes of space in the order of memory. Sums have dtype float64 for
// float64, else float32; maxima, NaN where there is one, x's. A window of no
// element has sum 0, and maximum -infinity.
struct PoolProblem {
  int64_t outer = 1, inner = 1;
  Windows windows[3];
  PoolKind kind = PoolKind::kSum;
  DType type = DType::kF32;
};

Status Pool(const PoolProblem& problem, const void* x, void* y,
            const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_POOL_POOL_H_
