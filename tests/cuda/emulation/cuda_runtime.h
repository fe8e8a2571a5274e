// SPDX-License-Identifier: Apache-2.0
//
// What programs beside the kernels use of the runtime, over host memory: what
// is enqueued is done at once, and the time of it is the host's.
#ifndef JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_
#define JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "cuda_runtime_api.h"

enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};
struct CUevent_st {
  std::chrono::steady_clock::time_point at;
};
using cudaEvent_t = CUevent_st*;

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t*) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

template <typename T>
cudaError_t cudaMalloc(T** data, size_t size) {
  *data = static_cast<T*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* to, int value, size_t size) {
  std::memset(to, value, size);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                              cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->at = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                        cudaEvent_t end) {
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

#endif  // JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_
