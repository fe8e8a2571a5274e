// SPDX-License-Identifier: Apache-2.0
//
// What operators on rows have in common: where an index points.
#ifndef JAX_LAYOUT_CORE_INDEX_PLAN_H_
#define JAX_LAYOUT_CORE_INDEX_PLAN_H_

#include <cstdint>
#include <span>
#include <string>

#include "core/float16.h"
#include "core/status.h"

namespace jax_layout {

// The types whose sums are taken; a complex number is two of its parts, and an
// unsigned integer adds as a signed one. They differ for a maximum.
enum class SumType {
  kF32,
  kF64,
  kBF16,
  kF16,
  kI8,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64
};

// What becomes of rows that share an index. NaN is the largest and the
// smallest.
enum class Reduction { kSum, kMax, kMin };

// The merged view: x is (batch, outer, extent, inner), index (batch, count) and
// what is selected (batch, outer, count, inner), all dense.
struct IndexPlan {
  int64_t batch = 1, outer = 1, extent = 0, count = 0, inner = 1;
  int64_t itemsize = 1;  // bytes of an element
  bool wide = false;     // int64 indices, else int32
  bool clip = false;     // out of range: the nearest, else none
  bool wrap = true;      // negative indices count from the end

  int64_t inner_bytes() const { return inner * itemsize; }
};

// The row that index i names; -1 for none.
JAX_LAYOUT_HOST_DEVICE inline int64_t ResolveIndex(int64_t i, int64_t extent,
                                                   bool clip, bool wrap) {
  if (wrap && i < 0) i += extent;
  if (i >= 0 && i < extent) return i;
  if (!clip) return -1;
  return i < 0 ? 0 : extent - 1;
}

// Index i of an array of either width.
JAX_LAYOUT_HOST_DEVICE inline int64_t IndexAt(const void* index, bool wide,
                                              int64_t i) {
  return wide ? static_cast<const int64_t*>(index)[i]
              : static_cast<const int32_t*>(index)[i];
}

// `shape` is that of the array with `extent`, `selected` that of the one with
// `count` in its place. The leading axes of index are axes of both.
inline Status MakeIndexPlan(std::span<const int64_t> shape,
                            std::span<const int64_t> index,
                            std::span<const int64_t> selected, int64_t axis,
                            int64_t itemsize, IndexPlan* plan) {
  *plan = {};
  const auto at = static_cast<size_t>(axis);
  if (index.empty() || axis < 0 || at >= shape.size() || index.size() - 1 > at)
    return Status::Error("index: axis must be one of x's, after those of " +
                         std::to_string(index.size()) + "-D index, got " +
                         std::to_string(axis) + ".");
  bool fits = selected.size() == shape.size();
  for (size_t d = 0; fits && d < shape.size(); ++d) {
    if (d == at) {
      plan->extent = shape[d];
      plan->count = index.back();
      fits = selected[d] == index.back();
      continue;
    }
    const bool batch = d + 1 < index.size();
    (batch ? plan->batch : d < at ? plan->outer : plan->inner) *= shape[d];
    fits = selected[d] == shape[d] && (!batch || index[d] == shape[d]);
  }
  if (!fits) {
    return Status::Error("index: the shapes do not belong together.");
  }
  plan->itemsize = itemsize;
  return Status::Ok();
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_INDEX_PLAN_H_
