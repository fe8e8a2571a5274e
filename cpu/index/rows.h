// SPDX-License-Identifier: Apache-2.0
//
// Loops over rows of elements of one type, compiled for several levels. A sum
// stands for any reduction: 16-bit floating point is widened in it.
#ifndef JAX_LAYOUT_CPU_INDEX_ROWS_H_
#define JAX_LAYOUT_CPU_INDEX_ROWS_H_

#include <cstdint>

#include "core/index/plan.h"
#include "cpu/permute/block.h"

namespace jax_layout {

// A pair of `index` says where a row of source goes. Sorted, those of a row of
// y are neighbours, in the order in which they are added.
struct Pair {
  uint32_t row, source;
  bool operator<(const Pair& other) const {
    return row != other.row ? row < other.row : source < other.source;
  }
};

inline constexpr int64_t kSums = 1024;  // elements of a row, summed at a time
inline constexpr int64_t kRows = 1024;  // indices resolved at a time

// `width` elements of one row of y: those of x + the rows of source.
struct RowSum {
  const char* source;
  int64_t stride;  // bytes from one row of source to the next
  const Pair* pairs;
  int64_t num_pairs;
  int64_t num_ahead;  // from `pairs` on, whose rows are wanted soon
  const char* x;      // null: nothing
  char* y;
  int64_t width;
  BlockFunction* stream;  // null: ordinary stores
};

// y = x + all parts, in their order.
struct PartSum {
  const char* parts;
  int64_t num_parts;
  int64_t stride;  // bytes from one part to the next
  const char* x;   // null: nothing; may be y
  char* y;
  int64_t width;
};

struct RowFunctions {
  void (*sum_row)(const RowSum&);
  void (*sum_parts)(const PartSum&);
  // sums[at[i]] += source[i], for `width` elements of rows that are `stride`
  // apart; a negative at[i] names none.
  void (*add_rows)(const void* source, const int64_t* at, int64_t rows,
                   int64_t width, int64_t stride, void* sums);
  // n elements, or sums, of nothing.
  void (*start)(void* y, int64_t n);
  void (*start_sums)(void* sums, int64_t n);
  int64_t sum_bytes;
};

const RowFunctions& RowFunctionsOf(Reduction reduction, SumType type);

// The rows that n indices from `first` on name, -1 for none; returns whether
// all name one.
bool ResolveRows(const IndexPlan& plan, const void* index, int64_t first,
                 int64_t n, int64_t* rows);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_INDEX_ROWS_H_
