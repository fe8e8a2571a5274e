// SPDX-License-Identifier: Apache-2.0
//
// A vector type for kernels.h that every processor has: 16-byte vectors of the
// compiler, which interleaves them with one instruction on x86-64 (SSE2),
// AArch64 and POWER.
#include "cpu/permute/kernels.h"

namespace jax_layout {
namespace {

struct Bytes16 {
  typedef uint8_t Reg __attribute__((vector_size(16)));
  typedef uint16_t Reg2 __attribute__((vector_size(16)));
  typedef uint32_t Reg4 __attribute__((vector_size(16)));
  typedef uint64_t Reg8 __attribute__((vector_size(16)));
  static constexpr int kBytes = 16;
  static constexpr bool kMasks = false;

  static JAX_LAYOUT_INLINE Reg Load(const char* p) {
    Reg v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static JAX_LAYOUT_INLINE void Store(char* p, Reg v) {
    std::memcpy(p, &v, sizeof(v));
  }
  // There is no portable non-temporal store.
  static JAX_LAYOUT_INLINE void Stream(char* p, Reg v) { Store(p, v); }

#if defined(__clang__)
#define JAX_LAYOUT_SHUFFLE(V, a, b, ...) \
  (Reg) __builtin_shufflevector((V)a, (V)b, __VA_ARGS__)
#else
#define JAX_LAYOUT_SHUFFLE(V, a, b, ...) \
  (Reg) __builtin_shuffle((V)a, (V)b, V{__VA_ARGS__})
#endif
  static JAX_LAYOUT_INLINE void CopyPart(char* y, const char* x,
                                         int64_t bytes) {
    CopyShort(y, x, bytes);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg Low(Reg a, Reg b) {
    if constexpr (W == 1) {
      return JAX_LAYOUT_SHUFFLE(Reg, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                21, 6, 22, 7, 23);
    }
    if constexpr (W == 2) {
      return JAX_LAYOUT_SHUFFLE(Reg2, a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    }
    if constexpr (W == 4) return JAX_LAYOUT_SHUFFLE(Reg4, a, b, 0, 4, 1, 5);
    if constexpr (W == 8) return JAX_LAYOUT_SHUFFLE(Reg8, a, b, 0, 2);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg High(Reg a, Reg b) {
    if constexpr (W == 1) {
      return JAX_LAYOUT_SHUFFLE(Reg, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                13, 29, 14, 30, 15, 31);
    }
    if constexpr (W == 2) {
      return JAX_LAYOUT_SHUFFLE(Reg2, a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    }
    if constexpr (W == 4) return JAX_LAYOUT_SHUFFLE(Reg4, a, b, 2, 6, 3, 7);
    if constexpr (W == 8) return JAX_LAYOUT_SHUFFLE(Reg8, a, b, 1, 3);
  }
#undef JAX_LAYOUT_SHUFFLE
  static JAX_LAYOUT_INLINE Reg LoadLanes(const char* x, const int64_t* at,
                                         int) {
    return Load(x + at[0]);
  }
  static JAX_LAYOUT_INLINE void TransposeLanes(Reg*) {}
};

}  // namespace
}  // namespace jax_layout
