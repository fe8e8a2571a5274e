// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernel on its own, the driver's copy, and events to time both: all
// on the default stream, in memory that exists. Functions return whether they
// could.
#include <cuda_runtime.h>

#include "cuda/permute/permute.h"

namespace jax_layout {
namespace {

cudaEvent_t begin = nullptr, end = nullptr;

}  // namespace

// Returns null where the arguments are no permute.
extern "C" PermuteKernel* jax_layout_cuda_permute_new(const int64_t* shape,
                                                      const int64_t* axes,
                                                      int rank,
                                                      int64_t itemsize) {
  const size_t n = static_cast<size_t>(rank);
  PermutePlan plan;
  if (!MakePermutePlan({shape, n}, {axes, n}, itemsize, &plan).ok()) {
    return nullptr;
  }
  return new PermuteKernel(ChoosePermuteKernel(plan));
}

extern "C" void jax_layout_cuda_permute_delete(PermuteKernel* kernel) {
  delete kernel;
}

extern "C" bool jax_layout_cuda_permute(const PermuteKernel* kernel,
                                        const void* x, void* y) {
  return Permute(*kernel, x, y, nullptr).ok();
}

extern "C" bool jax_layout_cuda_copy(const void* x, void* y, int64_t size) {
  return cudaMemcpyAsync(y, x, static_cast<size_t>(size),
                         cudaMemcpyDeviceToDevice, nullptr) == cudaSuccess;
}

extern "C" bool jax_layout_cuda_fill(void* y, int value, int64_t size) {
  return cudaMemset(y, value, static_cast<size_t>(size)) == cudaSuccess;
}

extern "C" bool jax_layout_cuda_read(const void* y, void* host, int64_t size) {
  return cudaMemcpy(host, y, static_cast<size_t>(size),
                    cudaMemcpyDeviceToHost) == cudaSuccess;
}

extern "C" bool jax_layout_cuda_start() {
  if (begin == nullptr && (cudaEventCreate(&begin) != cudaSuccess ||
                           cudaEventCreate(&end) != cudaSuccess)) {
    return false;
  }
  return cudaEventRecord(begin, nullptr) == cudaSuccess;
}

// Seconds since the start, once all that was enqueued is done; negative where
// something of it failed.
extern "C" double jax_layout_cuda_stop() {
  float milliseconds = 0;
  if (cudaEventRecord(end, nullptr) != cudaSuccess ||
      cudaEventSynchronize(end) != cudaSuccess ||
      cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess) {
    return -1;
  }
  return milliseconds / 1e3;
}

}  // namespace jax_layout
