// SPDX-License-Identifier: Apache-2.0
//
// The permute on CPUs. What moves at a time is a block, a matrix of chunks:
//
//   row i     x_offset[i]: chunks that are neighbours in y, from anywhere in x
//   column j  y_offset[j]: chunks that are neighbours in x, to anywhere in y
//
// and the block is transposed. The rows are the innermost axes of y, the
// columns the innermost axes of x, as many as it takes for the runs on both
// sides to fill cache lines. Loops walk the blocks. Where an axis is needed on
// both sides, because the others are tiny (RGB pixels to planes), the block is
// a ShuffleProgram instead.
#ifndef JAX_LAYOUT_CPU_PERMUTE_PERMUTE_H_
#define JAX_LAYOUT_CPU_PERMUTE_PERMUTE_H_

#include <cstdint>
#include <vector>

#include "core/permute/plan.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"
#include "cpu/permute/block.h"

namespace jax_layout {

const PermuteFunctions& FunctionsOf(Isa isa = BestIsa());

// Non-temporal stores are visible to other threads only after a fence.
void FenceStores();

// A loop over blocks. All its steps cover `full` of what `part` says, except
// the last, which covers `last`.
struct BlockLoop {
  enum Part { kNothing, kRows, kCols, kBytes };
  int64_t count;
  int64_t x_step, y_step;  // bytes
  Part part = kNothing;
  int64_t full = 0, last = 0;
};

// A plan with what this backend decides once per (shape, axes, itemsize).
struct PermuteKernel {
  PermutePlan plan;

  const PermuteFunctions* functions = nullptr;
  BlockFunction* run_block = nullptr;  // null: a shuffle program
  ShuffleProgram program, last_program;

  // The full block; a partial one takes prefixes of the offsets.
  int64_t rows = 1, cols = 1, bytes = 0;
  std::vector<int64_t> x_offset = {0}, y_offset = {0}, stage_offset = {0};
  int64_t run_cols = 1;  // consecutive columns that are one run of y

  std::vector<BlockLoop> loops;  // innermost first
  int64_t num_blocks = 1;
  int64_t blocks_per_task = 1;
  bool staged = false;  // through a buffer that caches hold
  bool stream = false;  // non-temporal stores where lines are whole
};

// Results of more than `stream` bytes leave by non-temporal stores.
PermuteKernel ChoosePermuteKernel(const PermutePlan& plan, Isa isa = BestIsa(),
                                  int64_t stream = StreamBytes());

// Writes the permuted x to y; both hold plan.size > 0 bytes and do not overlap.
Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PERMUTE_PERMUTE_H_
