// SPDX-License-Identifier: Apache-2.0
//
// Where the handlers meet the CUDA backend.
#ifndef JAX_LAYOUT_CUDA_PLATFORM_H_
#define JAX_LAYOUT_CUDA_PLATFORM_H_

#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

namespace jax_layout {

constexpr bool kSharesMemory = false;  // with the host, where handlers run

struct ExecutorContext {
  using Tag = ::xla::ffi::PlatformStream<cudaStream_t>;
  using Type = cudaStream_t;
};

inline cudaStream_t ToExecutor(cudaStream_t stream) { return stream; }

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PLATFORM_H_
