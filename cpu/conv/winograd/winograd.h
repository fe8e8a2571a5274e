// SPDX-License-Identifier: Apache-2.0
//
// Convolutions of 3 x 3 taps with 16 products where there were 36: Winograd's
// F(2x2, 3x3) (minimal filtering, Winograd, 1980; Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", CVPR 2016). Its transforms add
// and halve, so that errors are of the size of the plain sum's. Results that
// are not finite are those of the plain sum, in which padding counts as zeros:
// an infinite weight makes NaN of it.
#ifndef JAX_LAYOUT_CPU_CONV_WINOGRAD_WINOGRAD_H_
#define JAX_LAYOUT_CPU_CONV_WINOGRAD_WINOGRAD_H_

#include <cstdint>

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// Whether these kernels compute the problem, and serve it better than a
// library.
bool WinogradSupports(const ConvProblem& problem);

// Scratch memory that a call needs, in bytes.
int64_t WinogradWorkspace(const ConvProblem& problem, int num_threads);

Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor);

// The same in one of the instruction sets that the processor has, whether or
// not that is any better.
bool WinogradSupports(const ConvProblem& problem, Isa isa);
int64_t WinogradWorkspace(const ConvProblem& problem, int num_threads, Isa isa);
Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WINOGRAD_WINOGRAD_H_
