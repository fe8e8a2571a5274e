// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_PERMUTE_SHUFFLE_H_
#define JAX_LAYOUT_CPU_PERMUTE_SHUFFLE_H_

#include <cstdint>
#include <vector>

#include "core/permute/plan.h"
#include "cpu/permute/block.h"

namespace jax_layout {

// How much of each dim a program covers: the innermost axes of y and of x, as
// many as fill a vector on either side, whole except for one, `split`. False
// if that would be too much for a program. y_order and x_order list the dims
// innermost first.
bool ShuffleExtents(const PermutePlan& plan, const std::vector<int>& y_order,
                    const std::vector<int>& x_order, int64_t vector_bytes,
                    std::vector<int64_t>* take, int* split);

// The permute of take[d] steps of every dim d.
ShuffleProgram MakeShuffleProgram(const PermutePlan& plan,
                                  const std::vector<int>& y_order,
                                  const std::vector<int>& x_order,
                                  const std::vector<int64_t>& take,
                                  int64_t vector_bytes);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PERMUTE_SHUFFLE_H_
