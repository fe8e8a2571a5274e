// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CUDA_GEMM_LAUNCH_KEY_H_
#define JAX_LAYOUT_CUDA_GEMM_LAUNCH_KEY_H_

#include <cstdint>
#include <vector>

#include "core/gemm/problem.h"
#include "cuda/gemm/types.h"

namespace jax_layout {

// What the heuristic's answer depends on, beyond the problem. Alignments are
// powers of two that divide the address of every matrix, 16 at most: no access
// is wider, and another answer for better ones would be other bits.
struct LaunchKey {
  int device = 0;
  int64_t batch = 1;
  uint32_t a = 0, b = 0, y = 0, vector = 0, aux = 0;
  int64_t workspace_bytes = 0;
  bool operator==(const LaunchKey&) const = default;
};

inline uint32_t Alignment(const void* buffer, int64_t bytes,
                          const std::vector<GemmLoop>& loops,
                          int64_t GemmLoop::* stride) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(buffer) | 16;
  for (const GemmLoop& loop : loops) {
    bits |= static_cast<uintptr_t>(loop.*stride * bytes);
  }
  return static_cast<uint32_t>(bits & -bits);
}

// An address near a buffer, unless there is none, that is aligned no better.
inline const void* Example(const void* buffer, uint32_t alignment) {
  if (buffer == nullptr) return nullptr;
  const uintptr_t page = reinterpret_cast<uintptr_t>(buffer) & -uintptr_t{512};
  return reinterpret_cast<const void*>(page | alignment);
}

// The vector that an epilogue reads (bias) or writes (sums).
inline const void* Vector(const GemmBuffers& buffers) {
  return buffers.sums != nullptr ? buffers.sums : buffers.bias;
}

// Of a device's buffers; steps at once are the caller's to add.
inline LaunchKey MakeKey(const GemmProblem& problem, const GemmBuffers& buffers,
                         int device) {
  const auto& loops = problem.plan.loops;
  const int64_t bytes = Info(problem.operands).bytes;
  const int64_t y_bytes = Info(problem.result).bytes;
  LaunchKey key;
  key.device = device;
  key.a = Alignment(buffers.a, bytes, loops, &GemmLoop::a_stride);
  key.b = Alignment(buffers.b, bytes, loops, &GemmLoop::b_stride);
  key.y = Alignment(buffers.y, y_bytes, loops, &GemmLoop::y_stride);
  key.vector = Alignment(Vector(buffers), y_bytes, {}, &GemmLoop::y_stride);
  key.aux = Alignment(buffers.aux, y_bytes, loops, &GemmLoop::y_stride);
  key.workspace_bytes = buffers.workspace_bytes;
  return key;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_GEMM_LAUNCH_KEY_H_
