// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_AHEAD_H_
#define JAX_LAYOUT_CPU_AHEAD_H_

#include <cstdint>

#include "cpu/inline.h"

namespace jax_layout {

// Asks memory for rows a line at a time, in their order, as it and the
// processor's own prefetching like it best. That one does not follow where
// several rows are read side by side.
struct Ahead {
  const char* at = nullptr;
  int64_t left = 0, lines = 0;  // in this row; in each
  int64_t jump = 0;             // from behind a row to the next

  JAX_LAYOUT_INLINE void Next() {
    __builtin_prefetch(at, 0, 2);
    at += 64;
    if (--left == 0) {
      at += jump;
      left = lines;
    }
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_AHEAD_H_
