// SPDX-License-Identifier: Apache-2.0
//
// A block of scores: who sees whom, biases and masks.
#ifndef JAX_LAYOUT_CPU_ATTENTION_SCORES_H_
#define JAX_LAYOUT_CPU_ATTENTION_SCORES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/attention/kernels.h"
#include "cpu/attention/tiles.h"

namespace jax_layout {
namespace {

// The lengths of one of the batch.
struct Lengths {
  int64_t queries, keys;
};
inline Lengths LengthsOf(const AttentionProblem& p, const AttentionBuffers& b,
                         int64_t batch) {
  const int64_t keys = b.key_lengths == nullptr ? p.keys : b.key_lengths[batch];
  return {b.query_lengths == nullptr ? p.queries : b.query_lengths[batch],
          Least(p.keys, Most(0, keys))};
}

// Where the keys and values of a sequence lie, in elements from those of its
// head in the first block, or of the first sequence.
class KeyRows {
 public:
  KeyRows(const AttentionProblem& p, const AttentionBuffers& b, int64_t batch)
      : apart_(p.k.batch),
        row_(p.k.row),
        block_(p.block),
        blocks_(p.blocks),
        first_(batch * p.k.batch) {
    if (block_ > 0) table_ = b.block_tables + batch * (p.keys / block_);
  }

  bool in_blocks() const { return block_ > 0; }
  int64_t row() const { return row_; }
  // A block that is not there is the nearest that is, as jax's gather clips.
  int64_t At(int64_t key) const {
    if (block_ == 0) return first_ + key * row_;
    const int64_t at = table_[key / block_];
    return Most(0, Least(at, blocks_ - 1)) * apart_ + key % block_ * row_;
  }

 private:
  int64_t apart_, row_, block_, blocks_, first_;
  const int32_t* table_ = nullptr;
};

// Rows of a head that follow each other, `ld` elements apart.
template <class T>
struct Rows {
  const T* first;
  int64_t ld;
};

// Keys [first, first + count) of a head, where they lie; those of blocks are
// copied to `memory`.
template <class T>
Rows<T> Together(const KeyRows& rows, const T* head, int64_t first,
                 int64_t count, int64_t features, float* memory) {
  if (!rows.in_blocks()) return {head + rows.At(first), rows.row()};
  T* to = reinterpret_cast<T*>(memory);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * features, head + rows.At(first + i),
                static_cast<size_t>(features) * sizeof(T));
  }
  return {to, features};
}

// The keys that queries [first, first + count) see, all together: a query sees
// no less far than the one before it.
inline SeenKeys SeenByAny(const AttentionProblem& p, int64_t first,
                          int64_t count, const Lengths& lengths) {
  const int64_t end = Least(first + count, lengths.queries);
  if (first >= end) return {};
  return {KeysSeenBy(p, first, lengths.queries, lengths.keys).begin,
          KeysSeenBy(p, end - 1, lengths.queries, lengths.keys).end};
}

// The keys of a block that starts at `at` and has `count`, counted from there.
inline SeenKeys InBlock(const SeenKeys& seen, int64_t at, int64_t count) {
  const int64_t begin = Most(seen.begin - at, 0);
  return {begin, Most(begin, Least(seen.end - at, count))};
}

// Whole steps of products; what they have more is hidden.
template <class A>
JAX_LAYOUT_INLINE SeenKeys WholeSteps(const SeenKeys& seen) {
  return {seen.begin / A::kStep * A::kStep, UpTo(seen.end, A::kStep)};
}

// A bias of less counts as this, which hides a score as well: a row of infinite
// ones has equal scores.
constexpr float kLeastBias = -2.9e38f;

template <class V, class T>
void AddBias(const void* from, int64_t at, int64_t stride, int64_t begin,
             int64_t end, float* row) {
  constexpr int64_t kLanes = V::kLanes;
  const typename V::Reg least = V::Set(kLeastBias);
  const T* bias = static_cast<const T*>(from) + at;
  float one[kLanes];
  if (stride == 0) {
    V::Store(one, V::Load(bias, 1));
    const float all = std::max(one[0], kLeastBias);
    for (int64_t j = begin; j < end; ++j) row[j] += all;
    return;
  }
  for (int64_t j = begin; j < end; j += kLanes) {
    const int n = static_cast<int>(Least(kLanes, end - j));
    const typename V::Reg sum =
        V::Load(row + j, n) + V::Max(least, V::Load(bias + j, n));
    V::Store(row + j, sum, n);
  }
}

// Where a row of scores has something: [begin, end), in whole vectors, zero or
// hidden outside of what is seen.
struct RowOfScores {
  int64_t begin, end;
};

// Finishes the row of one query: its scores are in row[j] for the keys k0 + j
// of `block`. Those that are hidden become -inf, which is 0 as a power;
// where whole vectors are, that 0.
template <class V>
RowOfScores FinishScores(const AttentionTask& task, int64_t group,
                         int64_t query, const Lengths& lengths, int64_t k0,
                         const SeenKeys& block, float* row) {
  constexpr int64_t kLanes = V::kLanes;
  const AttentionProblem& p = task.problem;
  const SeenKeys all = KeysSeenBy(p, query, lengths.queries, lengths.keys);
  const int64_t begin = Most(all.begin - k0, block.begin);
  const int64_t end = Most(begin, Least(all.end - k0, block.end));
  if (begin >= end) {
    for (int64_t j = block.begin; j < block.end; ++j) row[j] = 0;
    return {block.begin, block.begin};
  }
  const RowOfScores out = {begin / kLanes * kLanes, UpTo(end, kLanes)};
  for (int64_t j = block.begin; j < out.begin; ++j) row[j] = 0;
  for (int64_t j = out.begin; j < begin; ++j) row[j] = -INFINITY;
  for (int64_t j = end; j < out.end; ++j) row[j] = -INFINITY;
  for (int64_t j = out.end; j < block.end; ++j) row[j] = 0;
  if (p.bias.present) {
    const int64_t at =
        p.bias.At(task.batch, task.head, group, query) + k0 * p.bias.key;
    const void* bias = task.buffers.bias;
    if (p.bias.type == DType::kBF16) {
      AddBias<V, BF16>(bias, at, p.bias.key, begin, end, row);
    } else if (p.bias.type == DType::kF16) {
      AddBias<V, F16>(bias, at, p.bias.key, begin, end, row);
    } else {
      AddBias<V, float>(bias, at, p.bias.key, begin, end, row);
    }
  }
  if (p.mask.present) {
    const uint8_t* mask =
        task.buffers.mask + p.mask.At(task.batch, task.head, group, query);
    if (p.mask.key == 0) {
      if (*mask == 0) {
        for (int64_t j = begin; j < end; ++j) row[j] = -INFINITY;
      }
    } else {
      mask += k0;
      for (int64_t j = begin; j < end; ++j) {
        row[j] = mask[j] != 0 ? row[j] : -INFINITY;
      }
    }
  }
  return out;
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_SCORES_H_
