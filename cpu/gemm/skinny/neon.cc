// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include "cpu/gemm/skinny/kernels.h"

namespace jax_layout {
namespace {

struct NeonInt8 : Pairs<int8_t, 4> {
  using Sum = int32_t;
  using Reg = int16x8_t;
  using SumReg = int32x4_t;
  static constexpr int kRegisters = 32;

  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p) {
    return vmovl_s8(vld1_s8(p));
  }
  static JAX_LAYOUT_INLINE Reg Load(const int8_t* p, int n) {
    int8_t all[8] = {};
    std::memcpy(all, p, n);
    return Load(all);
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p) {
    return vreinterpretq_s16_u16(vld1q_u16(p));
  }
  static JAX_LAYOUT_INLINE Reg Load(const uint16_t* p, int) { return Load(p); }
  static JAX_LAYOUT_INLINE int8x8_t Four(const int8_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return vreinterpret_s8_u32(vdup_n_u32(bits));
  }
  static JAX_LAYOUT_INLINE Reg Joined(const int8_t* row, const int8_t* next) {
    return vmovl_s8(vzip1_s8(Four(row), Four(next)));
  }
  static JAX_LAYOUT_INLINE void Keep(uint16_t* p, Reg w) {
    vst1q_u16(p, vreinterpretq_u16_s16(w));
  }
  static JAX_LAYOUT_INLINE Reg Spread(const uint16_t* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return vreinterpretq_s16_u32(vdupq_n_u32(pair));
  }
  static JAX_LAYOUT_INLINE SumReg MultiplyAdd(SumReg sum, Reg w, Reg x) {
    const SumReg low = vmull_s16(vget_low_s16(w), vget_low_s16(x));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(w, x)));
  }
  static JAX_LAYOUT_INLINE SumReg Zero() { return vdupq_n_s32(0); }
  static JAX_LAYOUT_INLINE SumReg LoadSums(const int32_t* p) {
    return vld1q_s32(p);
  }
  static JAX_LAYOUT_INLINE void StoreSums(int32_t* p, SumReg v) {
    vst1q_s32(p, v);
  }
  static JAX_LAYOUT_INLINE void Totals(const SumReg* sums, int32_t* p) {
    vst1q_s32(p, vpaddq_s32(vpaddq_s32(sums[0], sums[1]),
                            vpaddq_s32(sums[2], sums[3])));
  }
};

}  // namespace

void SkinnyNeon(const SkinnyBlock& block) {
  Skinny<NeonFloats, NeonInt8>(block);
}

}  // namespace jax_layout
#endif  // __aarch64__
