// SPDX-License-Identifier: Apache-2.0
#ifdef __aarch64__
#include "cpu/vectors/neon.h"

#include "cpu/gemm/matvec/kernels.h"

namespace jax_layout {

void MatvecNeon(const MatvecBlock& block) { Matvec<NeonFloats>(block); }

}  // namespace jax_layout
#endif  // __aarch64__
