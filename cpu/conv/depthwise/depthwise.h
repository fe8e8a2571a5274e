// SPDX-License-Identifier: Apache-2.0
//
// Depthwise convolutions, by our own vector kernels: here libraries fall back
// to a general product.
#ifndef JAX_LAYOUT_CPU_CONV_DEPTHWISE_DEPTHWISE_H_
#define JAX_LAYOUT_CPU_CONV_DEPTHWISE_DEPTHWISE_H_

#include <cstdint>

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether these kernels compute the problem, and serve it better than a
// library.
bool DepthwiseSupports(const ConvProblem& problem);

// Scratch memory that a call needs, in bytes.
int64_t DepthwiseWorkspace(const ConvProblem& problem, int num_threads);

Status Depthwise(const ConvProblem& problem, const ConvBuffers& buffers,
                 const Executor& executor);

// In one of the instruction sets that the processor has.
Status Depthwise(const ConvProblem& problem, const ConvBuffers& buffers,
                 const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_DEPTHWISE_H_
