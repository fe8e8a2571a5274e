// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include "core/conv/problem.h"
#include "cpu/conv/depthwise/last.h"
#include "cpu/conv/depthwise/plane_weights.h"
#include "cpu/conv/depthwise/planes.h"

namespace jax_layout {
namespace {

// What every processor has, or the compiler makes of smaller pieces.
struct Lanes {
  using Reg = float __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kHalves = false;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE Reg Zero() { return Reg{}; }
  static JAX_LAYOUT_INLINE Reg Set(float x) { return Reg{x, x, x, x}; }
  static JAX_LAYOUT_INLINE Reg Load(const float* p, int n = kLanes) {
    Reg v{};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v, int n = kLanes) {
    std::memcpy(p, &v, n * sizeof(float));
  }
  static JAX_LAYOUT_INLINE Reg Max(Reg a, Reg b) { return a > b ? a : b; }
  static JAX_LAYOUT_INLINE float Sum(Reg v) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  }
  static JAX_LAYOUT_INLINE void Split(Reg a, Reg b, Reg* even, Reg* odd) {
    *even = Reg{a[0], a[2], b[0], b[2]};
    *odd = Reg{a[1], a[3], b[1], b[3]};
  }
  static JAX_LAYOUT_INLINE void Merge(Reg even, Reg odd, Reg* a, Reg* b) {
    *a = Reg{even[0], odd[0], even[1], odd[1]};
    *b = Reg{even[2], odd[2], even[3], odd[3]};
  }
};

}  // namespace

constinit const DepthwiseKernels kDepthwisePortable = {
    Lanes::kLanes,     Last<Lanes>,         LastWeights<Lanes>,
    Planes<Lanes>,     PlaneWeights<Lanes>, SumLanes<Lanes>,
    ReadFloats<Lanes>, WriteFloats<Lanes>};

}  // namespace jax_layout
