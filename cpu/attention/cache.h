// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_ATTENTION_CACHE_H_
#define JAX_LAYOUT_CPU_ATTENTION_CACHE_H_

#include <cstdint>

#include "cpu/executor.h"

namespace jax_layout {

// Dense arrays: the cache is (front, batch, middle, rows, bytes), and what is
// new the same with `count` rows.
struct CacheProblem {
  int64_t front = 1, batch = 1, middle = 1, rows = 0, count = 0, bytes = 0;
  // Where the cache has `blocks` for its batch, which hold `rows` each: a
  // sequence has `width` of them, in the order of its row of `tables`.
  int64_t blocks = 0, width = 1;
  const int32_t* tables = nullptr;
};

// Whether all rows that are new have a place.
bool CacheHolds(const CacheProblem& problem, const int32_t* positions);

// Writes rows of each of the batch from its position on; those outside of the
// cache, or of blocks that are not there, are dropped.
void UpdateCache(const CacheProblem& problem, const void* rows,
                 const int32_t* positions, void* cache,
                 const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_CACHE_H_
