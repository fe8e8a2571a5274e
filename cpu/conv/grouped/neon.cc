// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include <cstdint>
#include <cstring>

#include "cpu/conv/grouped/kernels.h"

namespace jax_layout {
namespace {

struct Lanes : NeonFloats {
  static constexpr int kMost = 16, kMembers = 2;

  template <int n>
  static JAX_LAYOUT_INLINE Reg Repeat(const float* p) {
    if constexpr (n == 2) {
      double both;
      std::memcpy(&both, p, sizeof(both));
      return vreinterpretq_f32_f64(vdupq_n_f64(both));
    }
    return Set(*p);
  }
  // Bytes 4 i to 4 i + 3 for lane i.
  static JAX_LAYOUT_INLINE Reg Permute(Reg v, const int32_t* order) {
    const uint32x4_t first = vreinterpretq_u32_s32(vld1q_s32(order));
    const uint32x4_t bytes =
        vmlaq_n_u32(vdupq_n_u32(0x03020100), first, 0x04040404);
    return vreinterpretq_f32_u8(
        vqtbl1q_u8(vreinterpretq_u8_f32(v), vreinterpretq_u8_u32(bytes)));
  }
};

}  // namespace

constinit const GroupedKernels kGroupedNeon = GroupedKernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __aarch64__
