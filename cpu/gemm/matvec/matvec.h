// SPDX-License-Identifier: Apache-2.0
//
// Products with a vector, at the speed at which memory gives the matrix.
#ifndef JAX_LAYOUT_CPU_GEMM_MATVEC_MATVEC_H_
#define JAX_LAYOUT_CPU_GEMM_MATVEC_MATVEC_H_

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether m or n is 1, and GemmMatvec() does the rest of the problem: f32, bf16
// or f16 operands, a result of the same dtype or f32.
bool MatvecSupports(const GemmProblem& problem);

Status GemmMatvec(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor);

// In one of the instruction sets that the processor has.
Status GemmMatvec(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_MATVEC_MATVEC_H_
