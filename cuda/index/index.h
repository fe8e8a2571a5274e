// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CUDA_INDEX_INDEX_H_
#define JAX_LAYOUT_CUDA_INDEX_INDEX_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/index/plan.h"
#include "core/status.h"

namespace jax_layout {

// Enqueues y[b, o, i] = x[b, o, index[b, i]], rows of `inner` elements; where
// the index names none, elements are `fill`, which is read before this returns.
// No array is empty, and all are aligned to 16 bytes.
Status IndexSelect(const IndexPlan& plan, const void* x, const void* index,
                   const uint8_t* fill, void* y, cudaStream_t stream);

// Enqueues y[b, o, index[b, i]] += source[b, o, i], rows of `inner` elements.
// With `order`, index is sorted, stably, and index[b, i] was at order[b, i]:
// rows that meet are added in their order, 16-bit floating point in float32
// that is rounded once. Without it, 32-bit and 64-bit types are added
// atomically, in any order. x, what is added to, must be y itself.
Status IndexAdd(const IndexPlan& plan, SumType type, const void* index,
                const int32_t* order, const void* source, const void* x,
                void* y, cudaStream_t stream);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_INDEX_INDEX_H_
