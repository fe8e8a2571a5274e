// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_INDEX_INDEX_H_
#define JAX_LAYOUT_CPU_INDEX_INDEX_H_

#include <cstdint>

#include "core/index/plan.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// y[b, o, i] = x[b, o, index[b, i]], rows of `inner` elements; where the index
// names none, elements are `fill`. No array is empty.
Status IndexSelect(const IndexPlan& plan, const void* x, const void* index,
                   const uint8_t* fill, void* y, const Executor& executor);

// y = x, and to y[b, o, index[b, i]] is added source[b, o, i], rows of `inner`
// elements; 16-bit floating point is summed in float32 and rounded once. The
// order of a row's sum depends on the plan, not on the number of threads. x may
// be y itself, or null for nothing: for a sum zero.
Status IndexReduce(const IndexPlan& plan, Reduction reduction, SumType type,
                   const void* index, const void* source, const void* x,
                   void* y, const Executor& executor);

// The sum. `order` is not read: on a GPU, it is where sorted indices were.
inline Status IndexAdd(const IndexPlan& plan, SumType type, const void* index,
                       const int32_t*, const void* source, const void* x,
                       void* y, const Executor& executor) {
  return IndexReduce(plan, Reduction::kSum, type, index, source, x, y,
                     executor);
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_INDEX_INDEX_H_
