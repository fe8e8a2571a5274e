// SPDX-License-Identifier: Apache-2.0
//
// oneDNN's convolution, found at run time.
#ifndef JAX_LAYOUT_CPU_CONV_ONEDNN_ONEDNN_H_
#define JAX_LAYOUT_CPU_CONV_ONEDNN_ONEDNN_H_

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/conv/conv.h"

namespace jax_layout {

// Whether the library has the processor's products of bf16, or f16. It makes
// others of f32, several times slower than those of f32 itself.
bool OnednnSums16(DType type);

// For problems without negative padding of which no array is empty. Fills in
// all but the problem.
Status ChooseOnednnConv(const ConvProblem& problem, ConvKernel* kernel);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_ONEDNN_ONEDNN_H_
