// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include <cstdint>

#include "cpu/conv/depthwise/last.h"
#include "cpu/conv/depthwise/plane_weights.h"
#include "cpu/conv/depthwise/planes.h"

namespace jax_layout {
namespace {

struct Lanes : NeonFloats {
  static constexpr bool kHalves = true;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE void Split(Reg a, Reg b, Reg* even, Reg* odd) {
    *even = vuzp1q_f32(a, b);
    *odd = vuzp2q_f32(a, b);
  }
  static JAX_LAYOUT_INLINE void Merge(Reg even, Reg odd, Reg* a, Reg* b) {
    *a = vzip1q_f32(even, odd);
    *b = vzip2q_f32(even, odd);
  }
};

}  // namespace

constinit const DepthwiseKernels kDepthwiseNeon = {
    Lanes::kLanes,     Last<Lanes>,         LastWeights<Lanes>,
    Planes<Lanes>,     PlaneWeights<Lanes>, SumLanes<Lanes>,
    ReadFloats<Lanes>, WriteFloats<Lanes>};

}  // namespace jax_layout
#endif  // __aarch64__
