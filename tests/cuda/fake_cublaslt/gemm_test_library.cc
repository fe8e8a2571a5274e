// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's GEMM for tests/cuda/test_cublaslt.py, through ctypes.
// Every function that returns text returns "" or what went wrong.
#include <string>

#include "cuda/device.h"
#include "cuda/gemm/gemm.h"
#include "cuda/gemm/tuning.h"

namespace {

thread_local std::string text;

const char* Text(const jax_layout::Status& status) {
  text = status.message;
  return text.c_str();
}

}  // namespace

extern "C" {

struct Problem {
  const char* spec;
  const int64_t *a_shape, *b_shape;
  double alpha[2], beta[2];
  int a_rank, b_rank, operands, result, tf32, bias, activation, aux, derivative,
      sums, b_type, scales;
};

const char* OpenLibrary(const char* path) {
  const jax_layout::lt::Library* library;
  return Text(jax_layout::lt::Load(&library, path));
}

void SetDevice(int device) { fake::device = device; }

void SetClock(const int* clock) { fake::clock = clock; }

void SetCapturing(int capturing) { fake::capturing = capturing; }

int Allocated() { return fake::allocated; }

const char* TuneGemms(const char* path, int candidates) {
  return Text(jax_layout::TuneGemms(path, candidates));
}

void SetMachine(int driver, int devices, int capability) {
  fake::driver = driver;
  fake::devices = devices;
  fake::capability = capability;
}

void SetWithoutMemory(int without) { fake::without_memory = without; }

const char* WhyUnusable() { return Text({jax_layout::WhyUnusable()}); }

const char* Obstacle(const jax_layout::GemmKernel* kernel) {
  return Text({jax_layout::GemmObstacle(kernel->problem)});
}

int Claims(const jax_layout::GemmKernel* kernel) {
  return !jax_layout::GemmMethods(kernel->problem).empty();
}

int RelaxedCaptures() { return fake::relaxed; }

const char* MakeKernel(const Problem* from, jax_layout::GemmKernel** kernel) {
  using jax_layout::Activation;
  using jax_layout::DType;
  jax_layout::GemmProblem problem;
  bool in_place = false;
  jax_layout::Status status = jax_layout::MakeGemmPlan(
      from->spec, {from->a_shape, size_t(from->a_rank)},
      {from->b_shape, size_t(from->b_rank)}, &problem.plan, &in_place);
  if (!status.ok()) return Text(status);
  if (!in_place) return "not in place";
  problem.operands = static_cast<DType>(from->operands);
  problem.result = static_cast<DType>(from->result);
  problem.alpha = {from->alpha[0], from->alpha[1]};
  problem.beta = {from->beta[0], from->beta[1]};
  problem.tf32 = from->tf32;
  problem.bias = from->bias;
  problem.activation = static_cast<Activation>(from->activation);
  problem.aux = from->aux;
  problem.derivative = static_cast<Activation>(from->derivative);
  problem.sums = from->sums;
  problem.scales = from->scales;
  if (from->b_type != from->operands) {
    problem.b_type = static_cast<DType>(from->b_type);
    if (problem.plan.swapped) std::swap(problem.operands, *problem.b_type);
  }
  *kernel = new jax_layout::GemmKernel;
  return Text(jax_layout::ChooseGemmKernel(problem, *kernel));
}

void FreeKernel(jax_layout::GemmKernel* kernel) { delete kernel; }

// a and b in the order of the contraction.
const char* RunKernel(const jax_layout::GemmKernel* kernel,
                      const jax_layout::GemmBuffers* buffers) {
  jax_layout::GemmBuffers given = *buffers;
  if (kernel->problem.plan.swapped) {
    std::swap(given.a, given.b);
    std::swap(given.scale_a, given.scale_b);
  }
  return Text(jax_layout::Gemm(*kernel, given, nullptr));
}

}  // extern "C"
