// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_ATTENTION_ATTENTION_H_
#define JAX_LAYOUT_CPU_ATTENTION_ATTENTION_H_

#include <cstdint>

#include "core/attention/plan.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace jax_layout {

// More features than a kernel has room for.
inline constexpr int64_t kMostFeatures = 256;

struct AttentionBuffers {
  const void *q, *k, *v;
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t *query_lengths = nullptr, *key_lengths = nullptr;
  void* y;
  RowSum* sums;  // of each query
  // The block of each p.block keys of a sequence, by batch.
  const int32_t* block_tables = nullptr;
};

// Whether this processor has kernels for a problem.
bool AttentionSupports(const AttentionProblem& problem);

Status Attention(const AttentionProblem& problem,
                 const AttentionBuffers& buffers, const Executor& executor);

// In one of the instruction sets that the processor has.
Status Attention(const AttentionProblem& problem,
                 const AttentionBuffers& buffers, const Executor& executor,
                 Isa isa);

// Results and sums as Attention() made them, the gradient dy of the results,
// and the gradients that are wanted, shaped as q, k, v and, if there is one
// and its gradient is wanted, the bias.
struct AttentionGradientBuffers {
  AttentionBuffers forward;
  const void* dy;
  void *dq, *dk, *dv;
  void* dbias = nullptr;
};

// Always the same sums in the same order. Not of keys in blocks.
Status AttentionGradient(const AttentionProblem& problem,
                         const AttentionGradientBuffers& buffers,
                         const Executor& executor);
Status AttentionGradient(const AttentionProblem& problem,
                         const AttentionGradientBuffers& buffers,
                         const Executor& executor, Isa isa);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_ATTENTION_H_
