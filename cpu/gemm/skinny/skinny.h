// SPDX-License-Identifier: Apache-2.0
//
// Products with a few rows or columns: the large operand, "the weight", comes
// from memory once.
#ifndef JAX_LAYOUT_CPU_GEMM_SKINNY_SKINNY_H_
#define JAX_LAYOUT_CPU_GEMM_SKINNY_SKINNY_H_

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether m or n is at most 64, and GemmSkinny() does the rest of the problem:
// f32, bf16 or f16 operands and a result of the same dtype or f32, or int8 and
// int32.
bool SkinnySupports(const GemmProblem& problem);

// Whether m or n is larger than that, but at most 256, and the other operand
// contiguous along it, where it need not be packed. Not int8. A method of its
// own: it has others beside it than few rows have.
bool UnpackedSupports(const GemmProblem& problem);

Status GemmSkinny(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor);

// In one of the instruction sets that the processor has.
Status GemmSkinny(const GemmProblem& problem, const GemmBuffers& buffers,
                  const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_SKINNY_SKINNY_H_
