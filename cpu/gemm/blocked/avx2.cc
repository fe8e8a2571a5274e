// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/gemm/problem.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/gemm/blocked/kernels.h"
#include "cpu/vectors/avx2.h"

namespace jax_layout {

const BlockedKernels kBlockedAvx2 = kBlocked<Widened<Avx2Floats>>;

}  // namespace jax_layout
#endif  // __x86_64__
