// SPDX-License-Identifier: Apache-2.0
//
// Functions that the compiler makes for several instruction sets, of which the
// loader takes the best that the processor has.
#ifndef JAX_LAYOUT_CPU_CLONES_H_
#define JAX_LAYOUT_CPU_CLONES_H_

// JAX_LAYOUT_CLONES("avx2", "default")
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAX_LAYOUT_CLONES(...) __attribute__((target_clones(__VA_ARGS__)))
#else
#define JAX_LAYOUT_CLONES(...)
#endif

// What such functions call is made for their instruction set in them.
#define JAX_LAYOUT_INLINE inline __attribute__((always_inline))

#endif  // JAX_LAYOUT_CPU_CLONES_H_
