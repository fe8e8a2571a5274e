// SPDX-License-Identifier: Apache-2.0
//
// Vectors of f32 in NEON, as epilogue.h describes them. Every AArch64 processor
// has it, so that files that include this need no target of their own.
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

struct NeonFloats {
  using Reg = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;
  static constexpr int kTileRows = 8, kTileVectors = 3;
  static constexpr int kPrefetch = 0;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE Reg Zero() { return vdupq_n_f32(0); }
  static JAX_LAYOUT_INLINE Reg Set(float x) { return vdupq_n_f32(x); }
  static JAX_LAYOUT_INLINE Reg Load(const float* p) { return vld1q_f32(p); }
  static JAX_LAYOUT_INLINE Reg Load(const BF16* p) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(p));
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16));
  }
  static JAX_LAYOUT_INLINE Reg Load(const F16* p) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(p));
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
  }
  // There are no masks: pieces go through a buffer, 2 elements and 1.
  template <class T>
  static JAX_LAYOUT_INLINE Reg Load(const T* p, int n) {
    if (n == kLanes) return Load(p);
    T all[kLanes] = {};
    if (n & 2) std::memcpy(all, p, 2 * sizeof(T));
    if (n & 1) all[n - 1] = p[n - 1];
    return Load(all);
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v) { vst1q_f32(p, v); }
  // To the nearest even.
  static JAX_LAYOUT_INLINE void Store(BF16* p, Reg v) {
    const uint32x4_t x = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
    const uint32x4_t rounded =
        vaddq_u32(x, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t r =
        vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(r, 16));
  }
  static JAX_LAYOUT_INLINE void Store(F16* p, Reg v) {
    vst1_u16(reinterpret_cast<uint16_t*>(p),
             vreinterpret_u16_f16(vcvt_f16_f32(v)));
  }
  template <class T>
  static JAX_LAYOUT_INLINE void Store(T* p, Reg v, int n) {
    if (n == kLanes) return Store(p, v);
    T all[kLanes];
    Store(all, v);
    if (n & 2) std::memcpy(p, all, 2 * sizeof(T));
    if (n & 1) p[n - 1] = all[n - 1];
  }
  // Not FMAX and FMIN, which return a NaN that is the first.
  static JAX_LAYOUT_INLINE Reg Max(Reg a, Reg b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
  }
  static JAX_LAYOUT_INLINE Reg Min(Reg a, Reg b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
  }
  static JAX_LAYOUT_INLINE Reg WherePositive(Reg x, Reg z) {
    return vbslq_f32(vcgtq_f32(x, Zero()), z, Zero());
  }
  static JAX_LAYOUT_INLINE Reg Round(Reg v) { return vrndnq_f32(v); }
  // In two steps: 2^128 is no f32.
  static JAX_LAYOUT_INLINE Reg TimesTwoTo(Reg v, Reg n) {
    const int32x4_t all = vcvtq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(all, 1);
    return v * Power(half) * Power(vsubq_s32(all, half));
  }
  static JAX_LAYOUT_INLINE Reg Power(int32x4_t n) {
    return vreinterpretq_f32_s32(
        vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
  static JAX_LAYOUT_INLINE Reg Reciprocal(Reg v) { return Set(1.f) / v; }
  static JAX_LAYOUT_INLINE float Sum(Reg v) { return vaddvq_f32(v); }
  static JAX_LAYOUT_INLINE float Largest(Reg v) { return vmaxvq_f32(v); }
  static JAX_LAYOUT_INLINE Reg SumOfEach(const Reg* r) {
    return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3]));
  }
  static JAX_LAYOUT_INLINE void Transpose(Reg* r) {
    const float32x4x2_t low = vzipq_f32(r[0], r[2]);
    const float32x4x2_t high = vzipq_f32(r[1], r[3]);
    const float32x4x2_t first = vzipq_f32(low.val[0], high.val[0]);
    const float32x4x2_t last = vzipq_f32(low.val[1], high.val[1]);
    r[0] = first.val[0];
    r[1] = first.val[1];
    r[2] = last.val[0];
    r[3] = last.val[1];
  }
};

}  // namespace
}  // namespace jax_layout
