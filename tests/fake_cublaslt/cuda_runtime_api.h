// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA runtime that the GEMMs use, over host memory: found
// first on the include path, it lets g++ compile cuda/gemm*.cc as they are.
#ifndef JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_
#define JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_

#include <cstddef>
#include <cstring>

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

namespace fake {
inline thread_local int device = 0;
inline thread_local cudaStreamCaptureMode mode =
    cudaStreamCaptureModeThreadLocal;
inline thread_local int relaxed = 0;  // how often it became so
}  // namespace fake

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake::device;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size,
                                   cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(
    cudaStreamCaptureMode* mode) {
  const cudaStreamCaptureMode before = fake::mode;
  fake::mode = *mode;
  fake::relaxed += fake::mode == cudaStreamCaptureModeRelaxed;
  *mode = before;
  return cudaSuccess;
}

#endif  // JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_
