// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernel on its own: no Python dispatch, no XLA, an output that exists.
#include "cpu/permute/permute.h"

#include "benchmarks/native/thread_pool.h"

namespace jax_layout {

// Returns null where the arguments are no permute.
extern "C" PermuteKernel* jax_layout_permute_new(const int64_t* shape,
                                                 const int64_t* axes, int rank,
                                                 int64_t itemsize) {
  const size_t n = static_cast<size_t>(rank);
  PermutePlan plan;
  if (!MakePermutePlan({shape, n}, {axes, n}, itemsize, &plan).ok()) {
    return nullptr;
  }
  return new PermuteKernel(ChoosePermuteKernel(plan));
}

extern "C" void jax_layout_permute_delete(PermuteKernel* kernel) {
  delete kernel;
}

extern "C" bool jax_layout_permute(const PermuteKernel* kernel, const void* x,
                                   void* y, int threads) {
  return Permute(*kernel, x, y, ThreadPool::OfSize(threads)).ok();
}

}  // namespace jax_layout
