// SPDX-License-Identifier: Apache-2.0
//
// GEMMs of libraries that are found at run time. A method says whether it has a
// kernel for a problem, which loads its library, and makes the function that
// runs it.
#ifndef JAX_LAYOUT_CPU_GEMM_LIBRARIES_H_
#define JAX_LAYOUT_CPU_GEMM_LIBRARIES_H_

#include <string>

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/gemm/gemm.h"

namespace jax_layout {

// f32, bf16, f16, int8: what oneDNN has better than reference code for, and
// sums exactly.
bool OnednnSupports(const GemmProblem& problem);
Status ChooseOnednn(const GemmProblem& problem, GemmFunction* run);

// f32, f64, c64, c128.
bool OpenblasSupports(const GemmProblem& problem);
Status ChooseOpenblas(const GemmProblem& problem, GemmFunction* run);

// What the libraries name the processor that their kernels are for, "" where
// they are not.
std::string OnednnTarget();
std::string OpenblasTarget();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_LIBRARIES_H_
