// SPDX-License-Identifier: Apache-2.0
//
// The grouped convolutions as C functions, for tests without JAX.
#include "cpu/conv/grouped/grouped.h"
#include "tests/convnet/kernels/problem.h"
#include "tests/isas.h"
#include "tests/threads.h"

using namespace jax_layout;

extern "C" {

// The best instruction set here: none, AVX2, AVX-512.
int BestIsa() { return BestTestedIsa(); }

int Supports(int isa, const Problem* p) {
  return GroupedSupports(ToConv(*p), kTestedIsas[isa]);
}

int64_t Workspace(int isa, const Problem* p, int num_threads) {
  return GroupedWorkspace(ToConv(*p), num_threads, kTestedIsas[isa]);
}

// 0 if the result was written.
int Convolve(int isa, const Problem* p, int num_threads, void* x, void* w,
             void* y, const void* bias, void* workspace) {
  const Threads threads(num_threads);
  return Grouped(ToConv(*p), {x, w, y, bias, workspace}, threads,
                 kTestedIsas[isa])
                 .ok()
             ? 0
             : 1;
}

}  // extern "C"
