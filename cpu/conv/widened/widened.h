// SPDX-License-Identifier: Apache-2.0
//
// A convolution of 16-bit numbers as one of f32, for processors that have no
// products of theirs: what is read is widened ahead, and the sums are rounded
// once, behind it.
#ifndef JAX_LAYOUT_CPU_CONV_WIDENED_WIDENED_H_
#define JAX_LAYOUT_CPU_CONV_WIDENED_WIDENED_H_

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/conv/conv.h"

namespace jax_layout {

// The problem in f32.
ConvProblem Widened(const ConvProblem& problem);

// Makes the kernel of a problem of that of Widened(problem).
void Widen(const ConvProblem& problem, ConvKernel wide, ConvKernel* kernel);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WIDENED_WIDENED_H_
