// SPDX-License-Identifier: Apache-2.0
//
// Convolutions in groups of a few channels each, by our own vector kernels.
#ifndef JAX_LAYOUT_CPU_CONV_GROUPED_GROUPED_H_
#define JAX_LAYOUT_CPU_CONV_GROUPED_GROUPED_H_

#include <cstdint>

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether these kernels compute the problem, and serve it better than a
// library.
bool GroupedSupports(const ConvProblem& problem);

// Scratch memory that a call needs, in bytes.
int64_t GroupedWorkspace(const ConvProblem& problem, int num_threads);

Status Grouped(const ConvProblem& problem, const ConvBuffers& buffers,
               const Executor& executor);

// The same in one of the instruction sets that the processor has, whether or
// not that is any better.
bool GroupedSupports(const ConvProblem& problem, Isa isa);
int64_t GroupedWorkspace(const ConvProblem& problem, int num_threads, Isa isa);
Status Grouped(const ConvProblem& problem, const ConvBuffers& buffers,
               const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_GROUPED_GROUPED_H_
