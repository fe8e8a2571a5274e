// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/attention/kernels.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/attention/backward.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {

const AttentionKernels kAttentionAvx2 = kAttention<Avx2Floats>;

}  // namespace jax_layout
#endif  // __x86_64__
