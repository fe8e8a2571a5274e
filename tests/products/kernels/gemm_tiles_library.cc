// SPDX-License-Identifier: Apache-2.0
//
// The hand-written CPU GEMMs as a C function, for tests without JAX.
#include <vector>

#include "core/gemm/problem.h"
#include "cpu/gemm/amx/amx.h"
#include "cpu/gemm/blocked/blocked.h"
#include "cpu/gemm/matvec/matvec.h"
#include "cpu/gemm/skinny/skinny.h"
#include "tests/threads.h"
#include "tests/tiles_at_rest.h"

using namespace jax_layout;

extern "C" {

// As tests/products/test_gemm_tiles.py declares it.
struct Problem {
  int64_t m, n, k;
  int64_t a_transposed, a_ld, b_transposed, b_ld, y_ld;
  int64_t num_loops;
  int64_t loops[4][4];  // extent, stride of a, b, y
  int64_t operands, result, activation, derivative;
  int64_t bias, aux, sums;
  double alpha, beta;
};

enum Method {
  kAmx,
  kMatvecAvx512,
  kMatvecAvx2,
  kBlockedAvx512Bf16,
  kBlockedAvx512,
  kBlockedAvx2,
  kSkinnyAvx512Bf16,
  kSkinnyAvx512,
  kSkinnyAvx2
};

Isa LevelOf(int method) {
  switch (method) {
    case kBlockedAvx512Bf16:
    case kSkinnyAvx512Bf16:
      return Isa::kAvx512Bf16;
    case kMatvecAvx512:
    case kBlockedAvx512:
    case kSkinnyAvx512:
      return Isa::kAvx512;
    default:
      return Isa::kAvx2;
  }
}

// Whether the processor has what the method needs.
int HasMethod(int method) {
  GemmProblem problem;
  problem.operands = problem.result = DType::kBF16;
  if (method == kAmx) return AmxSupports(problem);
  return BestIsa() >= LevelOf(method);
}

// 0 if y was written, 1 for an error, 2 if the method does not do it.
int Gemm(int method, const Problem* p, int num_threads, const void* a,
         const void* b, const void* bias, void* y, void* aux, void* sums) {
  GemmProblem problem;
  GemmPlan& plan = problem.plan;
  plan.m = p->m;
  plan.n = p->n;
  plan.k = p->k;
  plan.a = {p->a_transposed != 0, p->a_ld};
  plan.b = {p->b_transposed != 0, p->b_ld};
  plan.y = {false, p->y_ld};
  for (int64_t l = 0; l < p->num_loops; ++l) {
    const int64_t* loop = p->loops[l];
    plan.loops.push_back({loop[0], loop[1], loop[2], loop[3]});
  }
  problem.operands = static_cast<DType>(p->operands);
  problem.result = static_cast<DType>(p->result);
  problem.activation = static_cast<Activation>(p->activation);
  problem.derivative = static_cast<Activation>(p->derivative);
  problem.bias = p->bias != 0;
  problem.aux = p->aux != 0;
  problem.sums = p->sums != 0;
  problem.alpha = p->alpha;
  problem.beta = p->beta;
  const GemmBuffers buffers = {a, b, bias, y, aux, sums, nullptr, 0};
  const Threads threads(num_threads);
  if (method == kAmx) {
    if (!AmxSupports(problem)) return 2;
    return GemmAmx(problem, buffers, threads).ok() ? 0 : 1;
  }
  const Isa isa = LevelOf(method);
  if (method >= kSkinnyAvx512Bf16) {
    if (!SkinnySupports(problem) && !UnpackedSupports(problem)) return 2;
    return GemmSkinny(problem, buffers, threads, isa).ok() ? 0 : 1;
  }
  if (method >= kBlockedAvx512Bf16) {
    if (!BlockedSupports(problem)) return 2;
    return GemmBlocked(problem, buffers, threads, isa).ok() ? 0 : 1;
  }
  if (!MatvecSupports(problem)) return 2;
  return GemmMatvec(problem, buffers, threads, isa).ok() ? 0 : 1;
}

}  // extern "C"
