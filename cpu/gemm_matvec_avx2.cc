// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/gemm_problem.h"  // before what follows is for one processor

#pragma GCC target("avx2,f16c,fma")
#include "cpu/gemm_avx2.h"
#include "cpu/gemm_matvec_kernels.h"

namespace jax_layout {

void MatvecAvx2(const MatvecBlock& block) { Matvec<Avx2Floats>(block); }

}  // namespace jax_layout
#endif  // __x86_64__
