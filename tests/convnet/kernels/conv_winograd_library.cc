// SPDX-License-Identifier: Apache-2.0
//
// The Winograd convolution as C functions, for tests without JAX.
#include "cpu/conv/winograd/winograd.h"
#include "tests/convnet/kernels/problem.h"
#include "tests/isas.h"
#include "tests/threads.h"

using namespace jax_layout;

extern "C" {

int BestIsa() { return BestTestedIsa(); }

int Supports(const Problem* p, int isa) {
  return WinogradSupports(ToConv(*p), kTestedIsas[isa]);
}

int64_t Workspace(const Problem* p, int num_threads, int isa) {
  return WinogradWorkspace(ToConv(*p), num_threads, kTestedIsas[isa]);
}

// 0 if the result was written.
int Convolve(int isa, const Problem* p, int num_threads, void* x, void* w,
             void* y, const void* bias, void* workspace) {
  const Threads threads(num_threads);
  return Winograd(ToConv(*p), {x, w, y, bias, workspace}, threads,
                  kTestedIsas[isa])
                 .ok()
             ? 0
             : 1;
}

}  // extern "C"
