// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/gemm_problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#include "cpu/conv_winograd_steps.h"
#include "cpu/gemm_avx512.h"

namespace jax_layout {
namespace {

struct Lanes : Avx512Floats {
  static constexpr int kRows = 12;
};

}  // namespace

constinit const WinogradKernels kWinogradAvx512 = KernelsOf<Lanes>();

}  // namespace jax_layout
#endif  // __x86_64__
