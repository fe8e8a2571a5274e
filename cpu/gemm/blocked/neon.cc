// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include "cpu/gemm/blocked/kernels.h"

namespace jax_layout {

const BlockedKernels kBlockedNeon = kBlocked<Widened<NeonFloats>>;

}  // namespace jax_layout
#endif  // __aarch64__
