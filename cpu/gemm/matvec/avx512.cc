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
#include "cpu/gemm/matvec/kernels.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {

void MatvecAvx512(const MatvecBlock& block) { Matvec<Avx512Floats>(block); }

}  // namespace jax_layout
#endif  // __x86_64__
