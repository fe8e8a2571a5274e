// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_GEMM_GEMM_H_
#define JAX_LAYOUT_CPU_GEMM_GEMM_H_

#include <functional>
#include <string>
#include <vector>

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

using GemmFunction = std::function<Status(const GemmBuffers&, const Executor&)>;

// A problem with what this backend decides once per problem.
struct GemmKernel {
  GemmProblem problem;
  GemmFunction run;
};

// Whether any method computes products of these types on this machine. What is
// false here is an error in ChooseGemmKernel.
bool GemmSupported(DType operands, DType result);

// The kernels and libraries that support a problem, the one that runs it first.
std::vector<std::string> GemmMethods(const GemmProblem& problem);

// What stands in the way of those on this machine: nothing.
inline std::string GemmObstacle(const GemmProblem&) { return ""; }

// All of them.
std::vector<std::string> GemmMethodNames();

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel);

Status Gemm(const GemmKernel& kernel, const GemmBuffers& buffers,
            const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_GEMM_H_
