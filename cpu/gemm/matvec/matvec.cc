// SPDX-License-Identifier: Apache-2.0
//
// From a problem with a vector in it to blocks of results, or parts of their
// sums, one per task.
#include "cpu/gemm/matvec/matvec.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/gemm/matvec/kernels.h"
#include "cpu/scratch.h"

namespace jax_layout {
namespace {

// Bytes of the matrix worth a task; a block of results ends lines of y.
constexpr int64_t kTaskBytes = 1 << 20;
constexpr int64_t kLine = 32;
constexpr int64_t kLeastParts = 4, kMostParts = 32;

// Blocks of results, or parts of the k of a single block.
struct Cut {
  int64_t block, blocks;
  int64_t depth, parts;
};

// A matrix whose rows hold results is read a few whole rows at a time, so that
// a task is one sweep over memory. How, and so in which order all is added up,
// does not depend on the number of threads.
Cut CutInto(const MatvecBlock& all, int64_t count, int64_t steps, int64_t in,
            int num_threads) {
  const int64_t parts = std::min(count * all.k * in / kTaskBytes, kMostParts);
  if (!all.along && steps == 1 && count <= kMatvecCount &&
      parts >= kLeastParts) {
    const int64_t depth = RoundUp(CeilDiv(all.k, parts), kMatvecRows);
    return {count, 1, depth, CeilDiv(all.k, depth)};
  }
  const int64_t row_bytes = std::max<int64_t>(1, all.k * in);
  const int64_t even = CeilDiv(count, num_threads);
  const int64_t wanted = all.along ? kTaskBytes / row_bytes : kMatvecCount;
  const int64_t least = std::max(std::min(even, wanted), kLine);
  const int64_t block = std::min(RoundUp(least, kLine), kMatvecCount);
  return {block, CeilDiv(count, block), all.k, 1};
}

const Kernels<MatvecFunction*> kKernels("matrix-vector",
                                        {
#ifdef __x86_64__
                                            {Isa::kAvx512, MatvecAvx512},
                                            {Isa::kAvx2, MatvecAvx2},
#elif defined(__aarch64__)
                                            {Isa::kNeon, MatvecNeon},
#endif
                                        });

}  // namespace

bool MatvecSupports(const GemmProblem& problem) {
  const DType in = problem.operands;
  return (problem.plan.m == 1 || problem.plan.n == 1) &&
         (in == DType::kF32 || in == DType::kBF16 || in == DType::kF16) &&
         (problem.result == in || problem.result == DType::kF32) &&
         problem.alpha.imag() == 0 && problem.beta.imag() == 0 &&
         (problem.activation == Activation::kNone ||
          problem.derivative == Activation::kNone) &&
         !problem.sums && kKernels.At() != nullptr;
}

Status GemmMatvec(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor) {
  return GemmMatvec(problem, buffers, executor, BestIsa());
}

Status GemmMatvec(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor, Isa isa) {
  const GemmPlan& plan = problem.plan;
  MatvecFunction* function = kKernels.Take(isa);
  if (function == nullptr) return Status::Error("gemm: no matvec here.");
  const int64_t steps = plan.Steps();
  const bool one_row = plan.m == 1;  // y = b^T a, else y = a b
  const int64_t count = one_row ? plan.n : plan.m;
  if (count == 0 || plan.m == 0 || steps == 0) return Status::Ok();

  const GemmMatrix& vector = one_row ? plan.a : plan.b;
  const GemmMatrix& matrix = one_row ? plan.b : plan.a;
  const int64_t in = ItemSize(problem.operands);
  const int64_t out = ItemSize(problem.result);
  MatvecBlock all = {};
  all.operands = problem.operands;
  // Without alpha the operands are not read.
  all.k = problem.alpha == 0. ? 0 : plan.k;
  all.ld = matrix.ld;
  all.along = matrix.transposed == one_row;
  // The vector is contiguous if its one row (column) is.
  all.x_stride = vector.transposed == one_row ? vector.ld : 1;
  all.y_stride = one_row ? 1 : plan.y.ld;
  all.one_column = !one_row;
  GemmEpilogue& e = all.epilogue;
  e.alpha = static_cast<float>(problem.alpha.real());
  e.beta = static_cast<float>(problem.beta.real());
  e.result = problem.result;
  e.activation = problem.activation;
  e.derivative = problem.derivative;
  e.write_aux = problem.aux;

  const Cut cut = CutInto(all, count, steps, in, executor.num_threads());
  const int64_t part_bytes =
      std::max<int64_t>(1, cut.depth * in) * std::min(cut.block, count);
  const int64_t together = std::max<int64_t>(1, kTaskBytes / 4 / part_bytes);
  float* parts = nullptr;
  std::atomic<int64_t> done = 0;
  if (cut.parts > 1) {
    thread_local Scratch memory;  // kept from call to call
    parts = reinterpret_cast<float*>(
        memory.Reserve(cut.parts * MatvecPart(count) * sizeof(float)));
    if (parts == nullptr) return Status::Error("gemm: out of memory.");
  }

  auto run = [&](int64_t unit, int64_t part, float* scratch) {
    const auto [a, b, y] = plan.At(unit / cut.blocks);
    const int64_t i = unit % cut.blocks * cut.block;
    MatvecBlock here = all;
    here.scratch = scratch;
    here.count = std::min(cut.block, count - i);
    const char* const operands[] = {
        static_cast<const char*>(buffers.a) + a * in,
        static_cast<const char*>(buffers.b) + b * in};
    here.x = operands[one_row ? 0 : 1];
    here.matrix =
        operands[one_row ? 1 : 0] + i * (here.along ? here.ld : 1) * in;
    const int64_t at = (y + i * here.y_stride) * out;
    here.epilogue.y = static_cast<char*>(buffers.y) + at;
    if (problem.aux || problem.derivative != Activation::kNone) {
      here.epilogue.aux = static_cast<char*>(buffers.aux) + at;
    }
    if (problem.bias) {
      here.epilogue.bias =
          static_cast<const char*>(buffers.bias) + (one_row ? i * out : 0);
    }
    if (parts == nullptr) return function(here);
    const int64_t first = part * cut.depth;
    here.k = std::min(cut.depth, all.k - first);
    here.x += first * here.x_stride * in;
    here.matrix += first * here.ld * in;
    here.part = parts + part * MatvecPart(count);
    function(here);
    if (done.fetch_add(1) + 1 < cut.parts) return;
    here.part = parts;
    here.num_parts = cut.parts;
    function(here);
  };

  auto scratch = [&] {
    thread_local std::vector<float> values;
    if (static_cast<int64_t>(values.size()) < cut.depth) {
      values.resize(cut.depth);
    }
    return values.data();
  };
  if (cut.parts > 1) {
    executor.ParallelFor(cut.parts,
                         [&](int64_t part) { run(0, part, scratch()); });
    return Status::Ok();
  }
  executor.ParallelForParts(steps * cut.blocks, together,
                            [&](int64_t begin, int64_t end) {
                              for (int64_t i = begin; i < end; ++i)
                                run(i, 0, scratch());
                            });
  return Status::Ok();
}

}  // namespace jax_layout
