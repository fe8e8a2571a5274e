// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include "cpu/attention/backward.h"

namespace jax_layout {

const AttentionKernels kAttentionNeon = kAttention<NeonFloats>;

}  // namespace jax_layout
#endif  // __aarch64__
