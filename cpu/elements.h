// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_ELEMENTS_H_
#define JAX_LAYOUT_CPU_ELEMENTS_H_

#include <cstdint>

#include "core/float16.h"
#include "cpu/clones.h"

namespace jax_layout {

// An element in memory, and in sums of them.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static JAX_LAYOUT_INLINE Sum Load(Stored v) { return v; }
  static JAX_LAYOUT_INLINE Stored Store(Sum v) { return v; }
};
struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  static JAX_LAYOUT_INLINE Sum Load(Stored v) { return FloatOfBf16(v); }
  static JAX_LAYOUT_INLINE Stored Store(Sum v) { return Bf16OfFloat(v); }
};
struct F16 {
  using Stored = uint16_t;
  using Sum = float;
  static JAX_LAYOUT_INLINE Sum Load(Stored v) { return FloatOfF16(v); }
  static JAX_LAYOUT_INLINE Stored Store(Sum v) { return F16OfFloat(v); }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ELEMENTS_H_
