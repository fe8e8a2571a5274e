// SPDX-License-Identifier: Apache-2.0
//
// The tiles are those of any processor: what the compiler makes of them here is
// what NEON has for it, ZIP1 and ZIP2. Programs take byte shuffles.
#ifdef __aarch64__
#include <arm_neon.h>

#include "cpu/permute/bytes16.h"

namespace jax_layout {
namespace {

struct Neon : Bytes16 {
  static JAX_LAYOUT_INLINE Reg Zero() { return Reg{}; }
  static JAX_LAYOUT_INLINE Reg LoadPart(const char* p, int64_t bytes) {
    if (bytes == kBytes) return Load(p);
    char part[kBytes] = {};
    CopyShort(part, p, bytes);
    return Load(part);
  }
  static JAX_LAYOUT_INLINE void StorePart(char* p, Reg v, int64_t bytes) {
    char part[kBytes];
    Store(part, v);
    CopyShort(p, part, bytes);
  }
  // Bytes of v into those of `to` whose index has the high bit set.
  static JAX_LAYOUT_INLINE Reg Shuffle(Reg to, const uint8_t* index, Reg v) {
    return vqtbx1q_u8(to, v, veorq_u8(vld1q_u8(index), vdupq_n_u8(0x80)));
  }
};

}  // namespace

const PermuteFunctions kPermuteNeon = {
    16,
    16,
    {TransposeBlock<Neon, 1>, TransposeBlock<Neon, 2>, TransposeBlock<Neon, 4>,
     TransposeBlock<Neon, 8>, TransposeBlock<Neon, 16>},
    {},
    MoveBlock<Neon>,
    CopyBlock<Neon>,
    RunShuffle<Neon>,
};

}  // namespace jax_layout
#endif  // __aarch64__
