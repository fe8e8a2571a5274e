// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/gemm.h"

#include <algorithm>

#include "cpu/gemm/amx/amx.h"
#include "cpu/gemm/libraries.h"
#include "cpu/gemm/matvec/matvec.h"
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

// Where a library is at least as fast as XLA's own dot: the least products in a
// single step and in each of several, and the least m, n and k.
struct LibraryFloor {
  DType operands;
  int64_t single, batched, m, n, k;
};

// Ratios to jnp under jit, two threads with AVX-512, jax 0.10:
//   single   4^3 0.84-0.94, 8^3 3.3-4.4 (9 us against 33)
//   batched  1024 steps of 8^3, 16^3, 32^3: f32 0.36 0.65 1.01, f16 0.40 1.17
//            1.73, f64 0.75 1.18 1.69, c64 0.87 1.31 2.53; 64 of 16^3, 32^3:
//            f32 0.73 0.50-1.03, f16 0.48 0.90, f64 0.54 0.84-1.53, c64 1.27
//            1.60, s8 0.67 0.61
//   m        m x 2048 x 2048 with m = 1, 8, 16, 32: f32 0.70-1.03 1.46 1.60
//            1.77, f64 0.36-0.77 0.87-1.18 1.17 0.95-1.32, c64 0.47 1.76 2.01
//            2.03, f16 1.41 1.01 1.19 1.46, s8 2.17 1.13 1.13 0.81-0.94
//   n        2048 x n x 2048 with n = 1, 8, 16, 32: f32 0.72 0.77 0.95 1.13,
//            f64 0.31 0.45 0.47 0.52, c64 0.53 1.43 1.65 2.00, f16 1.12 1.07
//            1.26 1.30, s8 3.63 0.74 1.11 1.08
//   k        1024 x 1024 x k with k = 1, 8, 16, 32: f32 0.96 0.87 0.77 1.03,
//   f64
//            0.58 1.01 0.64 0.80, c64 0.45 1.81 1.92 4.79, f16 0.79 2.47 2.07
//            1.68, s8 1.01 1.11 0.82 1.15
constexpr LibraryFloor kFloors[] = {
    {DType::kF32, 512, 64000, 2, 16, 32},  {DType::kBF16, 512, 64000, 1, 1, 8},
    {DType::kF16, 512, 64000, 1, 1, 8},    {DType::kS8, 512, 262144, 1, 16, 32},
    {DType::kF64, 512, 64000, 16, 64, 64}, {DType::kC64, 512, 4096, 8, 8, 8},
    {DType::kC128, 512, 4096, 8, 8, 8},
};

// Squares of 128 f64 are 1.5 to 1.7, of 512 0.80 to 0.96, of 1024 1.01 to 1.06.
constexpr int64_t kF64Gap[] = {int64_t{4} << 20, int64_t{512} << 20};

bool LibraryWorthwhile(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  for (const LibraryFloor& floor : kFloors) {
    if (floor.operands != problem.operands) continue;
    // Tiny squares are below the sides' floors, and still faster.
    const int64_t products = plan.m * plan.n * plan.k;
    if (plan.Steps() > 1 && products < floor.batched) return false;
    if (problem.operands == DType::kF64 && products > kF64Gap[0] &&
        products < kF64Gap[1]) {
      return false;
    }
    if (problem.operands == DType::kF32 && plan.b.transposed && plan.m > 8 &&
        plan.m < 64 && plan.n * plan.k > (1 << 20)) {
      return false;  // 16 or 32 x 4096 x 4096, NT: 0.90, 0.85
    }
    return products >= floor.single &&
           (std::max({plan.m, plan.n, plan.k}) <= 64 ||
            (plan.m >= floor.m && plan.n >= floor.n && plan.k >= floor.k));
  }
  return false;
}

// A call costs some microseconds, in which XLA does small products itself.
bool MatvecWorthwhile(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  return plan.Steps() == 1 && plan.m * plan.n * plan.k >= 4096;
}

bool AmxWorthwhile(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const int64_t products = plan.m * plan.n * plan.k;
  return products >= (plan.Steps() == 1 ? 4096 : 32768);
}

struct GemmMethod {
  const char* name;
  bool (*supports)(const GemmProblem&);
  bool (*worthwhile)(const GemmProblem&);  // of what it supports
  Status (*choose)(const GemmProblem&, GemmFunction*);
};

// The first that supports a problem runs it: our own kernels, then libraries.
constexpr GemmMethod kMethods[] = {
    {"matrix-vector", MatvecSupports, MatvecWorthwhile,
     ChooseAtOnce<GemmMatvec>},
    {"AMX", AmxSupports, AmxWorthwhile, ChooseAtOnce<GemmAmx>},
    {"oneDNN", OnednnSupports, LibraryWorthwhile, ChooseOnednn},
    {"OpenBLAS", OpenblasSupports, LibraryWorthwhile, ChooseOpenblas},
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
  if (problem.scales != 0 || problem.b_type.has_value()) {
    return Status::Error("gemm: no scales or mixed dtypes on CPUs, got " +
                         Text(problem) + ".");
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
  if (!Check(problem).ok()) return false;
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return method.worthwhile(problem);
  }
  return false;
}

std::string GemmImplementation(const GemmProblem& problem) {
  for (const GemmMethod& method : kMethods) {
    if (method.supports(problem)) return method.name;
  }
  return "";
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
