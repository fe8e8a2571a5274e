// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/gemm.h"

#include <string>
#include <vector>

#include "cpu/gemm/amx/amx.h"
#include "cpu/gemm/blocked/blocked.h"
#include "cpu/gemm/libraries.h"
#include "cpu/gemm/matvec/matvec.h"
#include "cpu/gemm/skinny/skinny.h"
#include "cpu/gemm/tiles.h"
#include "cpu/pages.h"

namespace jax_layout {
namespace {

// Makes the choice of a method that decides nothing ahead.
template <Status (*Run)(const GemmProblem&, const GemmBuffers&,
                        const Executor&)>
Status ChooseAtOnce(const GemmProblem& problem, GemmFunction* run) {
  *run = [problem](const GemmBuffers& buffers, const Executor& executor) {
    return Run(problem, buffers, executor);
  };
  return Status::Ok();
}

struct GemmMethod {
  const char* name;
  bool (*supports)(const GemmProblem&);
  Status (*choose)(const GemmProblem&, GemmFunction*);
};

// Our own kernels, then libraries. What runs a problem is the method that it
// names, else the first that supports it.
constexpr GemmMethod kMethods[] = {
    {"matrix-vector", MatvecSupports, ChooseAtOnce<GemmMatvec>},
    {"AMX", AmxSupports, ChooseAtOnce<GemmAmx>},
    {"skinny", SkinnySupports, ChooseAtOnce<GemmSkinny>},
    {"unpacked", UnpackedSupports, ChooseAtOnce<GemmSkinny>},
    {"blocked", BlockedSupports, ChooseAtOnce<GemmBlocked>},
    {"oneDNN", OnednnSupports, ChooseOnednn},
    {"OpenBLAS", OpenblasSupports, ChooseOpenblas},
};

// What runs a problem, null if nothing does. The libraries are not asked for no
// reason: an answer takes them a millisecond.
const GemmMethod* Find(const GemmProblem& problem) {
  for (const GemmMethod& method : kMethods) {
    if (problem.method == method.name && method.supports(problem)) {
      return &method;
    }
  }
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return &method;
  }
  return nullptr;
}

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
  if (problem.scales != 0 || problem.b_type.has_value()) {
    return Status::Error("gemm: no scales or mixed dtypes on CPUs, got " +
                         Text(problem) + ".");
  }
  bool known = problem.method.empty();
  for (const GemmMethod& method : kMethods)
    known |= problem.method == method.name;
  if (!known) {
    return Status::Error("gemm: there is no method " + problem.method +
                         ", asked for by " + Text(problem) + ".");
  }
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
  problem.plan.m = problem.plan.n = problem.plan.k = 128;
  problem.plan.a.ld = problem.plan.b.ld = problem.plan.y.ld = 128;
  problem.operands = operands;
  problem.result = result;
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return true;
  }
  return false;
}

std::vector<std::string> GemmMethods(const GemmProblem& problem) {
  std::vector<std::string> names;
  if (!Check(problem).ok()) return names;
  for (const GemmMethod& method : kMethods) {
    if (!method.supports(problem)) continue;
    names.insert(problem.method == method.name ? names.begin() : names.end(),
                 method.name);
  }
  return names;
}

std::vector<std::string> GemmMethodNames() {
  std::vector<std::string> names;
  for (const GemmMethod& method : kMethods) names.push_back(method.name);
  return names;
}

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel) {
  kernel->problem = problem;
  Status status = Check(problem);
  if (!status.ok()) return status;
  if (problem.plan.m * problem.plan.n * problem.plan.Steps() == 0 ||
      WithoutProduct(problem)) {
    return ChooseAtOnce<RunWithoutProduct>(problem, &kernel->run);
  }
  if (const GemmMethod* method = Find(problem)) {
    return method->choose(problem, &kernel->run);
  }
  return Status::Error("gemm: no kernel on this machine for " + Text(problem) +
                       "; is the package onednn-cpu-gomp or scipy-openblas32 "
                       "missing?");
}

Status Gemm(const GemmKernel& kernel, const GemmBuffers& buffers,
            const Executor& executor) {
  const GemmProblem& problem = kernel.problem;
  const GemmPlan& plan = problem.plan;
  const int64_t size =
      plan.m * plan.n * plan.Steps() * ItemSize(problem.result);
  if (problem.beta == 0.) {
    TouchPages(static_cast<char*>(buffers.y), size, executor);
  }
  if (problem.aux) {
    TouchPages(static_cast<char*>(buffers.aux), size, executor);
  }
  return kernel.run(buffers, executor);
}

}  // namespace jax_layout
