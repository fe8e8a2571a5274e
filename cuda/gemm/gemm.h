// SPDX-License-Identifier: Apache-2.0
//
// GEMMs by cuBLASLt, which is column-major: a row-major (r, c) buffer is a
// column-major (c, r) matrix, so y = a b is asked for as y^T = b^T a^T. Nothing
// is transposed in memory.
//
// What ChooseGemmKernel refuses, since cuBLASLt computes something else or
// nothing there:
//   dtypes       other than f32 -> f32, f64 -> f64, bf16 -> bf16 f32, f16 ->
//                f16 f32, e4m3 -> bf16 f16 f32 e4m3, s8 -> s32, c64, c128;
//                e4m3 with e5m2 also -> e5m2
//   8-bit floats other than a contiguous along k and b too (mk,nk->mn), with k,
//                every stride and the rows of y multiples of 16 bytes
//   alpha, beta  fractional for s32, complex for real types
//   bias, activation, derivative, aux, sums
//                of s32 and complex results; gelu and its derivative of f64
//   bias         of f32 results of 8-bit floats; with a derivative
//   scales       of other than 8-bit floats; anything but the product in them
//   aux          but for Gelu, and where rows of y and steps of the batch are
//                not multiples of 8 elements apart; relu's is a mask of bits
//   derivative   of relu; of an activation's result
//   sums         with alpha != 1 or anything but the product; n = 0
// On an H100 int8 also wants mk,nk->mn, and k, n and strides multiples of 4;
// cuBLASLt itself says so, when the GEMM first runs.
//
// z is summed in the compute type whatever the dtype of y: partial sums are
// reduced in f32 in the workspace, or not at all. So results repeat bit by bit.
#ifndef JAX_LAYOUT_CUDA_GEMM_GEMM_H_
#define JAX_LAYOUT_CUDA_GEMM_GEMM_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cuda/gemm/cublaslt.h"

namespace jax_layout {

class GemmLaunches;

// Products of zeros have this k, and both operands contiguous along it: no
// dtype has a smaller k or another layout everywhere.
constexpr int64_t kZerosK = 16;

// None yet: launches are made at the first call that needs them.
std::shared_ptr<GemmLaunches> NoGemmLaunches();

// A problem with what this backend decides once per problem, and what it keeps
// per device, alignment of the buffers and size of the workspace: cuBLASLt's
// descriptors and the answer of its heuristic.
struct GemmKernel {
  GemmProblem problem;  // as it is run
  std::string text;     // as it was given, for errors
  enum {
    kMultiply,
    // alpha or k is 0, so that a and b must not be read: zeros made in the
    // workspace take their place,
    kMultiplyZeros,
    // or the result needs no product, only zeros or what is there.
    kFill,
  } work = kMultiply;
  lt::ComputeType compute = lt::kCompute32F;
  lt::DataType scale = lt::kR32F;
  lt::Epilogue epilogue = lt::kDefault;
  alignas(16) std::array<std::byte, 16> alpha, beta;  // of type `scale`
  GemmLoop batch = {1, 0, 0, 0};  // the loop with the most steps, launched
  int64_t piece = 1;              // this many steps at once
  std::vector<GemmLoop> walked;   // the others: one launch per step
  std::shared_ptr<GemmLaunches> launches;
};

// cuBLASLt, if it computes it at all, as far as is known without a device, and
// not in so many launches that XLA, which transposes, would be faster.
std::vector<std::string> GemmMethods(const GemmProblem& problem);

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel);

// Whether cuBLASLt computes it on the current device: asks its heuristic, as
// the first call does. An error names what is missing.
Status TryGemm(const GemmKernel& kernel, int64_t workspace_bytes);

// The same of a problem, with the workspace that products get; nothing to say
// where there is no device, for which cuBLASLt is not asked.
std::string GemmObstacle(const GemmProblem& problem);

// Enqueues the GEMM. Neither allocates on the device nor waits for it. The
// first call per device, alignment and workspace runs the heuristic, which does
// not touch the stream and is allowed while the stream is captured. Where
// TuneGemms() asks for it, that call allocates, times candidates and waits,
// unless the stream is captured; then the first candidate serves until a call
// that is not.
Status Gemm(const GemmKernel& kernel, const GemmBuffers& buffers,
            cudaStream_t stream);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_GEMM_GEMM_H_
