// SPDX-License-Identifier: Apache-2.0
//
// The depthwise convolutions as C functions, for tests without JAX.
#include "cpu/conv/depthwise/depthwise.h"
#include "tests/convnet/kernels/problem.h"
#include "tests/isas.h"
#include "tests/threads.h"

using namespace jax_layout;

extern "C" {

// The best instruction set here: none, AVX2, AVX-512.
int BestIsa() { return BestTestedIsa(); }

int Supports(const Problem* p) { return DepthwiseSupports(ToConv(*p)); }

int64_t Workspace(const Problem* p, int num_threads) {
  return DepthwiseWorkspace(ToConv(*p), num_threads);
}

// 0 if the result was written.
int Convolve(int isa, const Problem* p, int num_threads, void* x, void* w,
             void* y, const void* bias, void* workspace) {
  const Threads threads(num_threads);
  return Depthwise(ToConv(*p), {x, w, y, bias, workspace}, threads,
                   kTestedIsas[isa])
                 .ok()
             ? 0
             : 1;
}

}  // extern "C"
