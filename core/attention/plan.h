// SPDX-License-Identifier: Apache-2.0
//
// What attention is, and where its arrays lie.
#ifndef JAX_LAYOUT_CORE_ATTENTION_PLAN_H_
#define JAX_LAYOUT_CORE_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/status.h"

namespace jax_layout {

// Strides in elements; features are contiguous.
struct AttentionArray {
  int64_t batch = 0, row = 0, head = 0, group = 0;

  int64_t At(int64_t b, int64_t k, int64_t g, int64_t r) const {
    return b * batch + k * head + g * group + r * row;
  }
};

// Strides of what has an element for every score; 0 where it is broadcast.
struct ScoreArray {
  bool present = false;
  DType type = DType::kF32;  // of a bias
  int64_t batch = 0, head = 0, group = 0, query = 0, key = 0;

  int64_t At(int64_t b, int64_t k, int64_t g, int64_t t) const {
    return b * batch + k * head + g * group + t * query;
  }
};

// softmax(scale q k^T + bias) v for each of `batch` x `heads` of keys and
// values, which `groups` heads of queries share. Scores that the mask, the
// order of time, a window or lengths hide take no part.
struct AttentionProblem {
  DType type = DType::kF32;
  int64_t batch = 1, heads = 1, groups = 1;
  int64_t queries = 0, keys = 0, features = 0;
  float scale = 1;
  bool causal = false;
  int64_t left = -1, right = -1;  // keys seen before and after; -1 for all
  AttentionArray q, k, v, y;      // y is shaped as q, v as k
  // Where a table says where in `blocks` each `block` keys of a sequence are,
  // k.batch is from one block to the next; 0 where every sequence is one.
  int64_t block = 0, blocks = 0;
  ScoreArray bias, mask;

  int64_t Rows() const { return batch * heads * groups * queries; }
  // Rows of numbers for each query, such as the logarithms of sums, are dense.
  int64_t RowAt(int64_t b, int64_t k, int64_t g, int64_t t) const {
    return ((b * heads + k) * groups + g) * queries + t;
  }
};

// Keys that a query sees: [begin, end).
struct SeenKeys {
  int64_t begin = 0, end = 0;
};

inline SeenKeys KeysSeenBy(const AttentionProblem& p, int64_t query,
                           int64_t query_length, int64_t key_length) {
  if (query >= query_length) return {};
  SeenKeys seen = {0, std::clamp<int64_t>(key_length, 0, p.keys)};
  if (p.causal) seen.end = std::min(seen.end, query + 1);
  if (p.right >= 0) seen.end = std::min(seen.end, query + p.right + 1);
  if (p.left >= 0) seen.begin = std::max<int64_t>(0, query - p.left);
  seen.end = std::max(seen.begin, seen.end);
  return seen;
}

// What a query's powers are divided by: two, as a large score would leave no
// digits for the logarithm in one number.
struct RowSum {
  float most;  // the largest score
  float log;   // the logarithm of the sum of powers about it
};

// The largest score of a query that sees nothing.
inline constexpr float kNothingSeen = -3.40282347e+38f;

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_ATTENTION_PLAN_H_
