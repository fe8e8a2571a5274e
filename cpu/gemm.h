// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_GEMM_H_
#define JAX_LAYOUT_CPU_GEMM_H_

#include "core/gemm_problem.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// A problem with what this backend decides once per problem.
struct GemmKernel {
  GemmProblem problem;
};

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel);

Status Gemm(const GemmKernel& kernel, const GemmBuffers& buffers,
            const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_H_
