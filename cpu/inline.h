// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_INLINE_H_
#define JAX_LAYOUT_CPU_INLINE_H_

// What each caller compiles itself, for its own instruction set; the first is
// for lambdas.
#define JAX_LAYOUT_LAMBDA __attribute__((always_inline))
#define JAX_LAYOUT_INLINE inline JAX_LAYOUT_LAMBDA

#endif  // JAX_LAYOUT_CPU_INLINE_H_
