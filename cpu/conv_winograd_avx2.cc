// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/gemm_problem.h"  // before what follows is for one processor

#pragma GCC target("avx2,fma,f16c")
#include "cpu/conv_winograd_steps.h"
#include "cpu/gemm_avx2.h"

namespace jax_layout {
namespace {

struct Lanes : Avx2Floats {
  static constexpr int kRows = 6;
};

}  // namespace

constinit const WinogradKernels kWinogradAvx2 = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
