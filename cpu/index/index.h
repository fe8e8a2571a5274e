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

// y = x, and y[b, o, index[b, i]] += source[b, o, i], rows of `inner` elements,
// in the order of i whatever the number of threads; 16-bit floating point is
// summed in float32 and rounded once. x may be y itself, or null for zero.
// `order` is not read: on a GPU, it is where sorted indices were.
Status IndexAdd(const IndexPlan& plan, SumType type, const void* index,
                const int32_t* order, const void* source, const void* x,
                void* y, const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_INDEX_INDEX_H_
