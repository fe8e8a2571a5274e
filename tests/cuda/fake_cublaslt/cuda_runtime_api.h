// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA runtime that the GEMMs and cuda_check_gemm use, over
// host memory: found first on the include path, it lets g++ compile them as
// they are. What is enqueued is done at once, captured or not.
#ifndef JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_
#define JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

namespace fake {
inline thread_local int device = 0;
inline thread_local cudaStreamCaptureMode mode =
    cudaStreamCaptureModeThreadLocal;
inline thread_local int relaxed = 0;  // how often it became so
inline bool capturing = false;
inline int allocated = 0;
inline const int* clock = nullptr;  // milliseconds, of the fake library
inline int driver = 13000, devices = 1, capability = 90;
inline bool without_memory = false;
}  // namespace fake

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake::device;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = fake::driver;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13010;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake::devices;
  return cudaSuccess;
}
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                          int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor
               ? fake::capability / 10
               : fake::capability % 10;
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

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
};
inline cudaError_t cudaStreamIsCapturing(cudaStream_t,
                                         cudaStreamCaptureStatus* status) {
  *status = fake::capturing ? cudaStreamCaptureStatusActive
                            : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
struct cudaDeviceProp {
  char name[256];
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties,
                                           int device) {
  std::strcpy(properties->name, device == 0 ? "Fake 0" : "Fake 1");
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** to, size_t size) {
  if (fake::without_memory) return cudaErrorMemoryAllocation;
  ++fake::allocated;
  *to = std::aligned_alloc(256, (size + 255) / 256 * 256);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  --fake::allocated;
  std::free(memory);
  return cudaSuccess;
}
using cudaEvent_t = int*;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  ++fake::allocated;
  *event = new int(0);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --fake::allocated;
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *event = *fake::clock;
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                        cudaEvent_t end) {
  *milliseconds = static_cast<float>(*end - *start);
  return cudaSuccess;
}

// For cuda_check_gemm alone.
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                              cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t*) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t,
                                        unsigned long long) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

#endif  // JAX_LAYOUT_TESTS_FAKE_CUBLASLT_CUDA_RUNTIME_API_H_
