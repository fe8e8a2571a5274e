// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/gemm/problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/gemm/blocked/kernels.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {

const BlockedKernels kBlockedAvx512 = kBlocked<Widened<Avx512Floats>>;

}  // namespace jax_layout
#endif  // __x86_64__
