// SPDX-License-Identifier: Apache-2.0
//
// bf16 GEMM on the AMX tiles of Sapphire Rapids and later.
#ifndef JAX_LAYOUT_CPU_GEMM_AMX_AMX_H_
#define JAX_LAYOUT_CPU_GEMM_AMX_AMX_H_

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// Whether this processor and system have AMX, and GemmAmx() does the problem:
// bf16 operands, a bf16 or f32 result. The first call asks the system for the
// tiles. AMX takes denormal operands for 0.
bool AmxSupports(const GemmProblem& problem);

Status GemmAmx(const GemmProblem& problem, const GemmBuffers& buffers,
               const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_AMX_AMX_H_
