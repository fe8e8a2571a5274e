// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of attention are, for each instruction set.
#ifndef JAX_LAYOUT_CPU_ATTENTION_KERNELS_H_
#define JAX_LAYOUT_CPU_ATTENTION_KERNELS_H_

#include <cstdint>

#include "cpu/attention/attention.h"

namespace jax_layout {

// Some blocks of the queries of one head of keys.
struct AttentionTask {
  const AttentionProblem& problem;
  const AttentionBuffers& buffers;
  int64_t batch, head;
  int64_t first, last;  // blocks: [first, last)
  float* memory;        // aligned
};

// The same of gradients.
struct AttentionGradientTask {
  const AttentionProblem& problem;
  const AttentionGradientBuffers& buffers;
  int64_t batch, head;
  int64_t first, last;
  float* memory;
  // Dense sums over its queries, where others have the same keys too; or none.
  float *dk, *dv;
  // Sums over its scores, which it adds to, or none.
  float* dbias;

  AttentionTask Scores() const {
    return {problem, buffers.forward, batch, head, first, last, memory};
  }
};

// A part of the keys of heads that lie next to each other, for few queries.
struct AttentionFewTask {
  const AttentionProblem& problem;
  const AttentionBuffers& buffers;
  int64_t batch, head, heads;
  int64_t part, parts;
  float* memory;  // as much for each head
  float* sums;    // of all, by batch, head and part
  int64_t size;   // of a part's sums

  float* Part(int64_t i) const {
    return sums + ((batch * problem.heads + head + i) * parts + part) * size;
  }
};

// Dense rows of `width`, of which there are `count` parts that are `apart`
// floats from each other: added up in their order, to element `at` of an array
// whose rows are `ld` apart.
struct PartsOfSums {
  DType type;
  const float* parts;
  int64_t count, apart, rows, width;
  void* to;
  int64_t at, ld;
};

// Queries that share their keys, and the most of them that are few.
inline int64_t QueriesOfHead(const AttentionProblem& p) {
  return p.groups * p.queries;
}
inline constexpr int64_t kFewQueries = 16;

struct AttentionKernels {
  int64_t queries;  // of a block
  // Floats of memory that a task of so many blocks needs.
  int64_t (*forward_memory)(const AttentionProblem&, int64_t blocks);
  void (*forward)(const AttentionTask&);
  int64_t (*backward_memory)(const AttentionProblem&, int64_t blocks);
  void (*backward)(const AttentionGradientTask&);
  void (*join)(const PartsOfSums&);
  // For few queries of a head: floats of memory for each head and of a part's
  // sums; the sums; and what all parts of a head make.
  int64_t (*few_memory)(const AttentionProblem&);
  int64_t (*few_part)(const AttentionProblem&);
  void (*few)(const AttentionFewTask&);
  void (*finish_few)(const AttentionTask&, float* parts, int64_t count);
};

#ifdef __x86_64__
extern const AttentionKernels kAttentionAmx, kAttentionAvx512Bf16,
    kAttentionAvx512, kAttentionAvx2;
#elif defined(__aarch64__)
extern const AttentionKernels kAttentionNeon;
#endif

// Whether bf16 may be multiplied two at a time.
inline bool InPairs(const AttentionProblem& p) {
  return p.type == DType::kBF16 && p.features % 2 == 0 && p.q.row % 2 == 0 &&
         p.k.row % 2 == 0;
}

// What kAttentionAmx is for. Memory, too, is for no fewer features.
inline bool FillsTiles(const AttentionProblem& p) {
  return InPairs(p) && p.features >= 16 && QueriesOfHead(p) > kFewQueries;
}

// Few queries that are for it too, as columns of tiles.
inline bool FewFillTiles(const AttentionProblem& p) {
  const int64_t queries = QueriesOfHead(p);
  return InPairs(p) && p.features % 32 == 0 && queries >= 4 &&
         queries <= kFewQueries;
}

// Queries of one group that follow each other.
struct QueryBlock {
  int64_t group, first, count;
};

inline int64_t BlocksOf(int64_t queries, int64_t block) {
  return (queries + block - 1) / block;
}

// Blocks of nearly the same size: all of one group, then of the next.
inline QueryBlock BlockAt(const AttentionProblem& p, int64_t block, int64_t i) {
  const int64_t blocks = BlocksOf(p.queries, block);
  const int64_t at = i % blocks, first = p.queries * at / blocks;
  return {i / blocks, first, p.queries * (at + 1) / blocks - first};
}

// Where sums over scores are that a bias's gradient is: an element for each of
// the axes query and key that the bias has. Groups have some of their own where
// either they or queries have in the bias, so that tasks of different queries
// need no more.
struct BiasSums {
  int64_t group, query, key, size;

  explicit BiasSums(const AttentionProblem& p) {
    key = p.bias.key == 0 ? 0 : 1;
    size = key == 0 ? 1 : p.keys;
    query = p.bias.query == 0 ? 0 : size;
    size *= query == 0 ? 1 : p.queries;
    group = p.bias.group == 0 && p.bias.query == 0 ? 0 : size;
    size *= group == 0 ? 1 : p.groups;
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_KERNELS_H_
