// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include <cstdint>

#include "cpu/conv/winograd/steps.h"

namespace jax_layout {
namespace {

struct Lanes : NeonFloats {
  static constexpr int kRows = 12;

  static JAX_LAYOUT_INLINE int64_t Every(int64_t step) { return step; }
  static JAX_LAYOUT_INLINE Reg Gather(const float* p, int64_t step) {
    return Reg{p[0], p[step], p[2 * step], p[3 * step]};
  }
};

}  // namespace

constinit const WinogradKernels kWinogradNeon = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __aarch64__
