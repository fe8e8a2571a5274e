// SPDX-License-Identifier: Apache-2.0
//
// Attention on CPUs as a C function, for tests without JAX.
#include <cstdint>

#include "cpu/attention/attention.h"
#include "tests/threads.h"
#include "tests/tiles_at_rest.h"

using namespace jax_layout;

extern "C" {

// As tests/attention/test_attention_kernels.py declares it.
struct Problem {
  int64_t type, batch, heads, groups, queries, keys, features;
  int64_t causal, left, right;
  int64_t q[4], k[4];        // strides of batch, row, head, group
  int64_t bias[6], mask[6];  // present, then strides; 0 where absent
  int64_t bias_type;
  int64_t block, blocks;  // 0 where keys are not in blocks
  double scale;
};

// By the index in the tests' ISAS.
static constexpr Isa kIsas[] = {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16,
                                Isa::kAmx};

int has_isa(int isa) { return kIsas[isa] <= BestIsa(); }

static AttentionProblem ProblemOf(const Problem* given) {
  AttentionProblem p;
  p.type = static_cast<DType>(given->type);
  p.batch = given->batch;
  p.heads = given->heads;
  p.groups = given->groups;
  p.queries = given->queries;
  p.keys = given->keys;
  p.features = given->features;
  p.causal = given->causal;
  p.left = given->left;
  p.right = given->right;
  p.scale = static_cast<float>(given->scale);
  const auto array = [](const int64_t* s) {
    return AttentionArray{s[0], s[1], s[2], s[3]};
  };
  p.q = p.y = array(given->q);
  p.k = p.v = array(given->k);
  const auto scores = [](const int64_t* s, int64_t type) {
    return ScoreArray{
        s[0] != 0, static_cast<DType>(type), s[1], s[2], s[3], s[4], s[5]};
  };
  p.bias = scores(given->bias, given->bias_type);
  p.mask = scores(given->mask, 0);
  p.block = given->block;
  p.blocks = given->blocks;
  return p;
}

int attention(const Problem* given, const void* q, const void* k, const void* v,
              const void* bias, const uint8_t* mask,
              const int32_t* query_lengths, const int32_t* key_lengths, void* y,
              RowSum* sums, const int32_t* block_tables, int threads, int isa) {
  const AttentionBuffers buffers = {
      q, k, v, bias, mask, query_lengths, key_lengths, y, sums, block_tables};
  const Threads executor(threads);
  return Attention(ProblemOf(given), buffers, executor, kIsas[isa]).ok();
}

int attention_gradient(const Problem* given, const void* q, const void* k,
                       const void* v, const void* bias, const uint8_t* mask,
                       const int32_t* query_lengths, const int32_t* key_lengths,
                       void* y, RowSum* sums, const void* dy, void* dq,
                       void* dk, void* dv, void* dbias, int threads, int isa) {
  const AttentionGradientBuffers buffers = {
      {q, k, v, bias, mask, query_lengths, key_lengths, y, sums},
      dy,
      dq,
      dk,
      dv,
      dbias};
  const Threads executor(threads);
  return AttentionGradient(ProblemOf(given), buffers, executor, kIsas[isa])
      .ok();
}

}  // extern "C"
