// SPDX-License-Identifier: Apache-2.0
//
// From a problem with few rows or columns to blocks of y, one per task.
#include "cpu/gemm/skinny/skinny.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "core/arithmetic.h"
#include "cpu/caches.h"
#include "cpu/gemm/finish.h"
#include "cpu/gemm/skinny/kernels.h"
#include "cpu/scratch.h"

namespace jax_layout {
namespace {

// Of blocks: whole strips and panels.
constexpr int64_t kLeastColumns = 96;
static_assert(kLeastColumns % kSkinnyStrip == 0 &&
              kLeastColumns % kSkinnyPanel == 0);
// Multiply-adds and bytes of the matrix that are worth a task.
constexpr int64_t kTaskWork = 512 << 10;

// Tasks that columns are cut into, columns of a task at most, which are whole
// strips or panels, and lanes along k of a block.
struct Cut {
  int64_t tasks_per_thread, columns, whole, steps;
};

// Along k each column is one piece of memory, and two thirds of L1 are x's.
// Across, a block and the next are in L2 together: the fewer the rows, the more
// it is memory that counts, which likes a page at a time; the more, the longer
// sums stay in registers.
Cut CutOf(const SkinnyBlock& b) {
  if (b.along) return {4, 576, kSkinnyPanel, CachesOfCore().l1 / 6};
  const int64_t size = ItemSize(b.operands);
  if (b.rows <= 8) {
    const bool fewer = b.rows > 2 && b.rows <= kWideRows && size == 4;
    return {1, 4096 / size, kSkinnyStrip, fewer ? 8 : 32};
  }
  if (b.rows <= 32) return {2, 512, kSkinnyStrip, 64};
  return {2, 256, kSkinnyStrip, kSkinnySteps};
}

// Columns of each block, if there are to be so many.
int64_t BlockOf(int64_t columns, int64_t blocks, const Cut& cut) {
  return std::max(RoundUp(CeilDiv(columns, blocks), cut.whole), kLeastColumns);
}

// The same where every thread is to have as many of them. Whole strips may
// leave the last turn to a few threads, 256 of 2816 columns to one of two: a
// turn less, of blocks hardly larger, is then done sooner.
int64_t EvenBlock(int64_t columns, int64_t blocks, int64_t threads,
                  const Cut& cut) {
  const auto longest = [&](int64_t block) {
    return CeilDiv(CeilDiv(columns, block), threads) * block;
  };
  const int64_t turns = CeilDiv(blocks, threads);
  const int64_t block = BlockOf(columns, turns * threads, cut);
  if (turns == 1) return block;
  const int64_t larger = BlockOf(columns, (turns - 1) * threads, cut);
  const bool sooner = longest(larger) < longest(block);
  return sooner && larger <= cut.columns * 5 / 4 ? larger : block;
}

const Kernels<SkinnyFunction*> kKernels("skinny",
                                        {
#ifdef __x86_64__
                                            {Isa::kAvx512Bf16,
                                             SkinnyAvx512Bf16},
                                            {Isa::kAvx512, SkinnyAvx512},
                                            {Isa::kAvx2, SkinnyAvx2},
#elif defined(__aarch64__)
                                            {Isa::kNeon, SkinnyNeon},
#endif
                                        });

// rows x cols of 4 bytes to cols x rows.
void Transpose(const uint32_t* x, int64_t ld, int64_t rows, int64_t cols,
               uint32_t* y) {
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = 0; i < rows; ++i) y[j * rows + i] = x[i * ld + j];
  }
}

// Whether it is the rows of x that are few, and not its columns; none if
// neither.
std::optional<bool> FewRows(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const auto most = [&](bool along) {
    return along || problem.operands == DType::kS8 ? kSkinnyRows
                                                   : kSkinnyRowsAcross;
  };
  const bool rows = plan.m <= most(plan.b.transposed);
  const bool columns = plan.n <= most(!plan.a.transposed);
  if (!rows && !columns) return std::nullopt;
  return rows && (plan.m <= plan.n || !columns);
}

bool Supports(const GemmProblem& problem) {
  const DType in = problem.operands;
  const DType out = problem.result;
  const bool floats =
      (in == DType::kF32 || in == DType::kBF16 || in == DType::kF16) &&
      (out == in || out == DType::kF32);
  return FewRows(problem).has_value() &&
         (floats || (in == DType::kS8 && out == DType::kS32)) &&
         problem.alpha.imag() == 0 && problem.beta.imag() == 0 &&
         !problem.sums && kKernels.At() != nullptr;
}

bool IsSkinny(const GemmProblem& problem) {
  return std::min(problem.plan.m, problem.plan.n) <= kSkinnyRows;
}

}  // namespace

bool SkinnySupports(const GemmProblem& problem) {
  return IsSkinny(problem) && Supports(problem);
}

bool UnpackedSupports(const GemmProblem& problem) {
  return !IsSkinny(problem) && Supports(problem);
}

Status GemmSkinny(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor) {
  return GemmSkinny(problem, buffers, executor, BestIsaWithoutTiles());
}

Status GemmSkinny(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor, Isa isa) {
  const GemmPlan& plan = problem.plan;
  SkinnyFunction* function = kKernels.Take(isa);
  if (function == nullptr) return Status::Error("gemm: no skinny kernel here.");
  const int64_t steps = plan.Steps();
  if (plan.m == 0 || plan.n == 0 || steps == 0) return Status::Ok();

  // y^T = b^T a^T if the columns are few.
  const std::optional<bool> fewer = FewRows(problem);
  if (!fewer.has_value()) {
    return Status::Error("gemm: not few rows or columns.");
  }
  const bool few_rows = *fewer;
  const GemmMatrix& few = few_rows ? plan.a : plan.b;
  const GemmMatrix& matrix = few_rows ? plan.b : plan.a;
  const int64_t in = ItemSize(problem.operands);
  const int64_t out = ItemSize(problem.result);
  const int64_t columns = few_rows ? plan.n : plan.m;
  SkinnyBlock all = {};
  all.operands = problem.operands;
  all.rows = few_rows ? plan.m : plan.n;
  // Without alpha the operands are not read.
  all.k = problem.alpha == 0. ? 0 : plan.k;
  all.ld = matrix.ld;
  all.along = matrix.transposed == few_rows;
  const bool contiguous = few.transposed != few_rows;
  all.x_row = contiguous ? few.ld : 1;
  all.x_k = contiguous ? 1 : few.ld;

  const Cut cut = CutOf(all);
  all.steps = cut.steps;
  const int64_t threads = executor.num_threads();
  const int64_t tasks = std::max(CeilDiv(threads * cut.tasks_per_thread, steps),
                                 CeilDiv(columns, cut.columns));
  const int64_t block = steps == 1 ? EvenBlock(columns, tasks, threads, cut)
                                   : BlockOf(columns, tasks, cut);
  const int64_t blocks = CeilDiv(columns, block);
  const int64_t sums_bytes = 4 * all.rows * RoundUp(block, kSkinnyStrip);
  const int64_t bytes = kSkinnyScratch + 2 * sums_bytes;

  auto run = [&](int64_t unit, char* scratch) {
    const auto [a, b, y] = plan.At(unit / blocks);
    const int64_t j = unit % blocks * block;
    SkinnyBlock here = all;
    here.count = std::min(block, columns - j);
    here.x = few_rows ? static_cast<const char*>(buffers.a) + a * in
                      : static_cast<const char*>(buffers.b) + b * in;
    here.matrix = few_rows ? static_cast<const char*>(buffers.b) + b * in
                           : static_cast<const char*>(buffers.a) + a * in;
    here.matrix += j * (here.along ? here.ld : 1) * in;
    here.scratch = scratch;
    here.sums = scratch + kSkinnyScratch;
    const int64_t ld = RoundUp(here.count, kSkinnyStrip);
    std::fill_n(here.sums, 4 * here.rows * ld, 0);
    function(here);

    const int64_t at = (y + j * (few_rows ? 1 : plan.y.ld)) * out;
    GemmBlock done = {here.rows, here.count, here.sums, ld,
                      nullptr,   nullptr,    nullptr,   plan.y.ld};
    if (!few_rows) {
      char* transposed = here.sums + sums_bytes;
      Transpose(reinterpret_cast<const uint32_t*>(here.sums), ld, here.rows,
                here.count, reinterpret_cast<uint32_t*>(transposed));
      std::swap(done.rows, done.cols);
      done.product = transposed;
      done.product_ld = done.cols;
    }
    if (problem.bias) {
      done.bias =
          static_cast<const char*>(buffers.bias) + (few_rows ? j * out : 0);
    }
    done.y = static_cast<char*>(buffers.y) + at;
    if (buffers.aux != nullptr) {
      done.aux = static_cast<char*>(buffers.aux) + at;
    }
    FinishGemm(problem, problem.alpha, problem.beta, done);
  };

  const int64_t units = steps * blocks;
  const int64_t work =
      all.rows * std::min(block, columns) * std::max<int64_t>(16, all.k);
  const int64_t together = std::max<int64_t>(1, kTaskWork / work);
  std::atomic<bool> failed = false;
  executor.ParallelForParts(units, together, [&](int64_t unit, int64_t end) {
    thread_local Scratch memory;  // kept from call to call
    char* scratch = memory.Reserve(bytes);
    if (scratch == nullptr) {
      failed = true;
      return;
    }
    for (; unit < end; ++unit) run(unit, scratch);
  });
  return failed ? Status::Error("gemm: out of memory.") : Status::Ok();
}

}  // namespace jax_layout
