// SPDX-License-Identifier: Apache-2.0
//
// From (shape, axes, itemsize) to the smallest equivalent permute.
#ifndef JAX_LAYOUT_CORE_PERMUTE_PLAN_H_
#define JAX_LAYOUT_CORE_PERMUTE_PLAN_H_

#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"

namespace jax_layout {

// Fewer than 2^63 elements fit in at most 62 axes of extent 2 or more.
inline constexpr int kMaxRank = 62;

// One axis of the result. Strides count chunks (see PermutePlan).
struct PermuteDim {
  int64_t extent;
  int64_t x_stride;
  int64_t y_stride;
};

// y[i[axes[0]], i[axes[1]], ...] = x[i[0], i[1], ...], reduced: unit axes are
// dropped, axes that stay neighbours in the same order are merged, and an
// innermost axis that stays innermost is folded, with the element, into one
// `chunk` of bytes that moves as a whole.
//
//   rank == 0   a copy of `chunk` bytes (identity and pure reshapes).
//   rank >= 2   dims[] lists the axes of y, outermost first, y dense:
//               dims[rank - 1].y_stride == 1. Exactly one other axis has
//               x_stride == 1: the innermost of x.
//   size == 0   nothing to move.
struct PermutePlan {
  int64_t itemsize = 0;  // bytes of one element
  int64_t chunk = 0;     // bytes that move as a whole, a multiple of itemsize
  int64_t size = 0;      // bytes of x, and of y
  int rank = 0;
  PermuteDim dims[kMaxRank] = {};

  // The position in dims of the axis that is innermost in x; rank >= 2.
  int InnermostOfX() const {
    int d = 0;
    while (dims[d].x_stride != 1) ++d;
    return d;
  }
};

inline Status MakePermutePlan(std::span<const int64_t> shape,
                              std::span<const int64_t> axes, int64_t itemsize,
                              PermutePlan* plan) {
  *plan = {};
  if (itemsize < 1) {
    return Status::Error("permute: itemsize must be positive, got " +
                         std::to_string(itemsize) + ".");
  }
  if (axes.size() != shape.size()) {
    return Status::Error("permute: axes must name every axis of x, got " +
                         std::to_string(axes.size()) + " axes for rank " +
                         std::to_string(shape.size()) + ".");
  }
  plan->itemsize = itemsize;
  // The size first: with it known to fit, no stride below can overflow.
  const int64_t rank = static_cast<int64_t>(shape.size());
  plan->size = itemsize;
  bool empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) {
      return Status::Error("permute: extents must not be negative, got " +
                           std::to_string(extent) + ".");
    }
    empty |= extent == 0;
  }
  for (int64_t extent : shape) {
    if (empty) break;
    if (__builtin_mul_overflow(plan->size, extent, &plan->size)) {
      return Status::Error("permute: x must be smaller than 2^63 bytes.");
    }
  }
  for (int64_t i = 0; i < rank; ++i) {
    bool valid = axes[i] >= 0 && axes[i] < rank;
    for (int64_t j = 0; j < i; ++j) valid &= axes[j] != axes[i];
    if (!valid) {
      return Status::Error(
          "permute: axes must reorder the axes of x, got axis " +
          std::to_string(axes[i]) + " at position " + std::to_string(i) +
          " for rank " + std::to_string(rank) + ".");
    }
  }
  if (empty) {
    plan->size = 0;
    return Status::Ok();
  }

  // Walk y's axes outermost first; an axis whose predecessor in y is also its
  // neighbour in x continues the run. Strides in elements for now.
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t extent = shape[axes[i]];
    if (extent == 1) continue;
    int64_t x_stride = 1;
    for (int64_t d = axes[i] + 1; d < rank; ++d) x_stride *= shape[d];
    PermuteDim* last = plan->rank > 0 ? &plan->dims[plan->rank - 1] : nullptr;
    if (last != nullptr && last->x_stride == extent * x_stride) {
      last->extent *= extent;
      last->x_stride = x_stride;
    } else {
      plan->dims[plan->rank++] = {extent, x_stride, 0};
    }
  }
  // Fold the tail that is innermost in both into the chunk.
  int64_t tail = 1;
  if (plan->rank > 0 && plan->dims[plan->rank - 1].x_stride == 1) {
    tail = plan->dims[--plan->rank].extent;
  }
  plan->chunk = tail * itemsize;
  int64_t y_stride = 1;
  for (int d = plan->rank - 1; d >= 0; --d) {
    plan->dims[d].x_stride /= tail;
    plan->dims[d].y_stride = y_stride;
    y_stride *= plan->dims[d].extent;
  }
  return Status::Ok();
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_PERMUTE_PLAN_H_
