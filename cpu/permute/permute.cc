// SPDX-License-Identifier: Apache-2.0
#include "cpu/permute/permute.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/pages.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace jax_layout {

void FenceStores() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

namespace {

// A few tasks per thread even out what else the machine does.
constexpr int64_t kTasksPerThread = 4;

// Where a walk over the blocks stands.
class Walk {
 public:
  Walk(const PermuteKernel& kernel, const char* x, char* y, int64_t block)
      : kernel_(kernel), x_(x), y_(y) {
    for (size_t l = 0; l < kernel.loops.size(); ++l) {
      Step(l, block % kernel.loops[l].count);
      block /= kernel.loops[l].count;
    }
  }

  void Next(int64_t steps) {
    for (size_t l = 0; l < kernel_.loops.size(); ++l) {
      Step(l, steps);
      if (index_[l] < kernel_.loops[l].count) return;
      Step(l, -index_[l]);
      steps = 1;
    }
  }

  const char* x() const { return x_; }
  char* y() const { return y_; }
  int64_t index(int l) const { return index_[l]; }

 private:
  void Step(size_t l, int64_t steps) {
    index_[l] += steps;
    x_ += steps * kernel_.loops[l].x_step;
    y_ += steps * kernel_.loops[l].y_step;
  }

  const PermuteKernel& kernel_;
  const char* x_;
  char* y_;
  int64_t index_[kMaxRank + 1] = {};
};

void RunBlocks(const PermuteKernel& kernel, const char* x, char* y,
               int64_t begin, int64_t end) {
  alignas(64) static thread_local char stage[kStageBytes];
  PermuteBlock block;
  block.x_offset = kernel.x_offset.data();
  block.y_offset = kernel.y_offset.data();
  block.stage = kernel.staged ? stage : nullptr;
  block.stage_offset = kernel.stage_offset.data();
  block.run_cols = kernel.run_cols;
  // Lines of y are whole for the chosen blocks only if y begins on one.
  block.stream = kernel.stream &&
                 (kernel.staged || kernel.run_block == kernel.functions->copy ||
                  reinterpret_cast<intptr_t>(y) % 64 == 0);
  Walk walk(kernel, x, y, begin);
  for (; begin < end; ++begin) {
    block.x = walk.x();
    block.y = walk.y();
    block.rows = kernel.rows;
    block.cols = kernel.cols;
    block.bytes = kernel.bytes;
    for (size_t l = 0; l < kernel.loops.size(); ++l) {
      const BlockLoop& loop = kernel.loops[l];
      if (loop.part == BlockLoop::kNothing) continue;
      const int64_t size =
          walk.index(l) + 1 < loop.count ? loop.full : loop.last;
      if (loop.part == BlockLoop::kRows) block.rows = size;
      if (loop.part == BlockLoop::kCols) block.cols = size;
      if (loop.part == BlockLoop::kBytes) block.bytes = size;
    }
    kernel.run_block(block);
    walk.Next(1);
  }
}

void RunShuffles(const PermuteKernel& kernel, const char* x, char* y,
                 int64_t begin, int64_t end) {
  // The innermost loop is the only one that can end in a partial step.
  const BlockLoop once = {1, 0, 0};
  const BlockLoop& inner = kernel.loops.empty() ? once : kernel.loops[0];
  const int64_t whole =
      inner.last == inner.full ? inner.count : inner.count - 1;
  Walk walk(kernel, x, y, begin);
  while (begin < end) {
    const bool last = walk.index(0) >= whole;
    const ShuffleProgram& program = last ? kernel.last_program : kernel.program;
    const int64_t repeat =
        last ? 1 : std::min(end - begin, whole - walk.index(0));
    kernel.functions->shuffle(
        {program.outputs.data(), static_cast<int64_t>(program.outputs.size()),
         program.windows.data(), program.lines.data(),
         static_cast<int64_t>(program.lines.size()), program.whole, walk.x(),
         walk.y(), repeat, inner.x_step, inner.y_step, kernel.stream});
    begin += repeat;
    walk.Next(repeat);
  }
}

}  // namespace

Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               const Executor& executor) {
  const char* src = static_cast<const char*>(x);
  char* dst = static_cast<char*>(y);
  TouchPages(dst, kernel.plan.size, executor);
  const int64_t blocks = kernel.num_blocks;
  const int64_t tasks = kTasksPerThread * std::max(1, executor.num_threads());
  const int64_t most = std::max(kernel.blocks_per_task, CeilDiv(blocks, tasks));
  executor.ParallelForParts(blocks, most, [&](int64_t begin, int64_t end) {
    if (kernel.run_block != nullptr) {
      RunBlocks(kernel, src, dst, begin, end);
    } else {
      RunShuffles(kernel, src, dst, begin, end);
    }
    if (kernel.stream) FenceStores();
  });
  return Status::Ok();
}

}  // namespace jax_layout
