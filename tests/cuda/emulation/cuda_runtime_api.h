// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA runtime that this library's kernels use, on the host:
// found first on the include path, it lets g++ compile cuda/*.cu as they are.
// The threads of a block are fibers, switched at barriers and shuffles; blocks
// run in turn. See emulation.cc. Or nothing runs and launches are recorded, for
// tests/ptx.
#ifndef JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_API_H_
#define JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_API_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  unsigned x, y;
} __attribute__((aligned(8)));
struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
namespace emulation {
extern int multiprocessors;
}
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::multiprocessors;
  return cudaSuccess;
}

namespace emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

void SyncThreads();
unsigned long long Shuffle(unsigned mask, unsigned long long value, int lane);
void GlobalLoad(const void* from, void* to, size_t bytes);
void GlobalStore(void* to, const void* from, size_t bytes);
cudaError_t Launch(const cudaLaunchConfig_t& config,
                   const std::function<void()>& thread);
// Whether launches are recorded, with the bytes of each argument.
bool Recording();
void Record(const cudaLaunchConfig_t& config, const void* kernel,
            const std::vector<std::string>& args);

}  // namespace emulation

extern emulation::Index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#define __syncthreads() ::emulation::SyncThreads()

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return static_cast<T>(emulation::Shuffle(mask, value, lane));
}

// Byte i of the result is the byte of b:a that nibble i of the selector names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned n = selector >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * n) & 0xff) << (8 * i);
  }
  return result;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (bits & 31));
}

template <typename T>
T __ldg(const T* from) {
  T value;
  emulation::GlobalLoad(from, &value, sizeof(T));
  return value;
}

template <typename T>
T __ldcg(const T* from) {
  return __ldg(from);
}

template <typename T>
T __ldcs(const T* from) {
  return __ldg(from);
}

template <typename T>
void __stwb(T* to, T value) {
  emulation::GlobalStore(to, &value, sizeof(T));
}

template <typename T>
void __stcs(T* to, T value) {
  __stwb(to, value);
}

// Fibers are switched at barriers only, so this is atomic.
template <typename T>
T atomicAdd(T* to, T value) {
  const T old = __ldg(to);
  __stwb(to, static_cast<T>(old + value));
  return old;
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Params...), Args&&... args) {
  if (emulation::Recording()) {
    const std::tuple<Params...> values(args...);
    std::apply(
        [&](const auto&... value) {
          emulation::Record(*config, reinterpret_cast<const void*>(kernel),
                            {std::string(reinterpret_cast<const char*>(&value),
                                         sizeof(value))...});
        },
        values);
    return cudaSuccess;
  }
  return emulation::Launch(*config, [&] { kernel(args...); });
}

#endif  // JAX_LAYOUT_TESTS_CUDA_EMULATION_CUDA_RUNTIME_API_H_
