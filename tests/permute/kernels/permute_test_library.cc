// SPDX-License-Identifier: Apache-2.0
//
// The CPU permute as a C function, for tests without JAX.
#include "core/permute/plan.h"
#include "cpu/permute/permute.h"
#include "tests/isas.h"
#include "tests/threads.h"

extern "C" {

int BestIsa() { return jax_layout::BestTestedIsa(); }

// 0 if y was written.
int Permute(int rank, const int64_t* shape, const int64_t* axes,
            int64_t itemsize, int isa, int num_threads, int run_inline,
            const void* x, void* y) {
  jax_layout::PermutePlan plan;
  const size_t n = static_cast<size_t>(rank);
  if (!jax_layout::MakePermutePlan({shape, n}, {axes, n}, itemsize, &plan)
           .ok()) {
    return 1;
  }
  const jax_layout::PermuteKernel kernel =
      jax_layout::ChoosePermuteKernel(plan, jax_layout::kTestedIsas[isa],
                                      /*stream=*/12 << 20);
  if (plan.size == 0) return 0;
  const jax_layout::Threads threads(num_threads, run_inline != 0);
  return jax_layout::Permute(kernel, x, y, threads).ok() ? 0 : 1;
}

}  // extern "C"
