// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include "core/conv/problem.h"
#include "cpu/conv/grouped/kernels.h"

namespace jax_layout {
namespace {

// What every processor has, or the compiler makes of smaller pieces.
struct Lanes {
  using Reg = float __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kMost = 12, kMembers = 1;

  static JAX_LAYOUT_INLINE Reg Zero() { return Reg{}; }
  static JAX_LAYOUT_INLINE Reg Load(const float* p, int n = kLanes) {
    Reg v{};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
  }
  static JAX_LAYOUT_INLINE void Store(float* p, Reg v) {
    std::memcpy(p, &v, sizeof(v));
  }
  static JAX_LAYOUT_INLINE Reg Max(Reg a, Reg b) { return a > b ? a : b; }
  template <int n>
  static JAX_LAYOUT_INLINE Reg Repeat(const float* p) {
    return Reg{*p, *p, *p, *p};
  }
  static JAX_LAYOUT_INLINE Reg Permute(Reg v, const int32_t*) { return v; }
};

}  // namespace

constinit const GroupedKernels kGroupedPortable = GroupedKernelsOf<Lanes>();

}  // namespace jax_layout
