// SPDX-License-Identifier: Apache-2.0
//
// Products in f32 of operands that are cut, and packed, to fit the caches.
#ifndef JAX_LAYOUT_CPU_GEMM_BLOCKED_BLOCKED_H_
#define JAX_LAYOUT_CPU_GEMM_BLOCKED_BLOCKED_H_

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether GemmBlocked() does the problem: f32, bf16 or f16 operands, a result
// of the same dtype or f32.
bool BlockedSupports(const GemmProblem& problem);

Status GemmBlocked(const GemmProblem& problem, const GemmBuffers& buffers,
                   const Executor& executor);

// In one of the instruction sets that the processor has.
Status GemmBlocked(const GemmProblem& problem, const GemmBuffers& buffers,
                   const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_BLOCKED_BLOCKED_H_
