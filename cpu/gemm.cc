// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"

#include "cpu/gemm_libraries.h"
#include "cpu/gemm_tiles.h"

namespace jax_layout {
namespace {

// Makes the choice of a method that decides nothing ahead.
template <Status (*Run)(const GemmProblem&, const GemmBuffers&,
                        const Executor&)>
[[maybe_unused]] Status ChooseAtOnce(const GemmProblem& problem,
                                     GemmFunction* run) {
  *run = [problem](const GemmBuffers& buffers, const Executor& executor) {
    return Run(problem, buffers, executor);
  };
  return Status::Ok();
}

struct GemmMethod {
  bool (*supports)(const GemmProblem&);
  Status (*choose)(const GemmProblem&, GemmFunction*);
};

// The first that supports a problem runs it: our own kernels, then libraries.
// {XSupports, ChooseAtOnce<GemmX>} for kernels without a state.
constexpr GemmMethod kMethods[] = {
    {OnednnSupports, ChooseOnednn},
    {OpenblasSupports, ChooseOpenblas},
};

// Nothing is summed: y is what the epilogue makes of zero. a and b are not
// read.
bool WithoutProduct(const GemmProblem& problem) {
  return problem.plan.k == 0 || problem.alpha == 0.;
}
Status RunWithoutProduct(const GemmProblem& problem, const GemmBuffers& buffers,
                         const Executor& executor) {
  const GemmTiling tiling = MakeGemmTiling(problem.plan, {.tasks_per_thread = 1,
                                                          .min_rows = 1,
                                                          .min_cols = 1024,
                                                          .rows_first = true});
  return ForEachGemmTile(
      problem, tiling, buffers, executor, [&](const GemmTile& tile) {
        FinishGemm(problem, 0, problem.beta,
                   {tile.rows, tile.cols, nullptr, 0, tile.bias, tile.y,
                    tile.aux, problem.plan.y.ld});
        return Status::Ok();
      });
}

Status Check(const GemmProblem& problem) {
  const bool complex =
      problem.result == DType::kC64 || problem.result == DType::kC128;
  const bool activation = problem.activation != Activation::kNone ||
                          problem.derivative != Activation::kNone;
  if (activation && (complex || problem.result == DType::kS32)) {
    return Status::Error("gemm: activations are of real numbers, got " +
                         Text(problem) + ".");
  }
  if (!complex && (problem.alpha.imag() != 0 || problem.beta.imag() != 0)) {
    return Status::Error("gemm: alpha and beta must be real for " +
                         Text(problem) + ".");
  }
  return Status::Ok();
}

}  // namespace

bool GemmSupported(DType operands, DType result) {
  GemmProblem problem;
  problem.plan.m = problem.plan.n = problem.plan.k = 64;
  problem.plan.a.ld = problem.plan.b.ld = problem.plan.y.ld = 64;
  problem.operands = operands;
  problem.result = result;
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return true;
  }
  return false;
}

bool GemmWorthwhile(const GemmProblem& problem) {
  return GemmSupported(problem.operands, problem.result);
}

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel) {
  kernel->problem = problem;
  Status status = Check(problem);
  if (!status.ok()) return status;
  if (problem.plan.m * problem.plan.n * problem.plan.Steps() == 0 ||
      WithoutProduct(problem)) {
    return ChooseAtOnce<RunWithoutProduct>(problem, &kernel->run);
  }
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return method.choose(problem, &kernel->run);
  }
  return Status::Error("gemm: no kernel on this machine for " + Text(problem) +
                       "; is the package onednn-cpu-gomp or scipy-openblas32 "
                       "missing?");
}

Status Gemm(const GemmKernel& kernel, const GemmBuffers& buffers,
            const Executor& executor) {
  return kernel.run(buffers, executor);
}

}  // namespace jax_layout
