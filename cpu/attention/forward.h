// SPDX-License-Identifier: Apache-2.0
//
// Attention by blocks (Dao et al., FlashAttention, arXiv:2205.14135, and
// FlashAttention-2, arXiv:2307.08691): scores of some queries and some keys at
// a time, whose powers are summed with the values as they come. Each query
// keeps the largest score so far, and its sums are made smaller where it grows.
#ifndef JAX_LAYOUT_CPU_ATTENTION_FORWARD_H_
#define JAX_LAYOUT_CPU_ATTENTION_FORWARD_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/attention/scores.h"

namespace jax_layout {
namespace {

// Less than any score but those that are hidden.
constexpr float kLeastScore = -3e38f;

// Memory of a task, in floats from its beginning.
template <class V>
struct ForwardMemory {
  int64_t wide;   // floats of a query's sums
  int64_t panel;  // of values
  int64_t q = 0, scores, keys, values, sums, most, total, mean, together, end;

  ForwardMemory(const AttentionProblem& p, int64_t blocks) {
    wide = UpTo(p.features, V::kLanes);
    panel = kKeys * kCols<V>;
    const int64_t panels = UpTo(p.features, kCols<V>) / kCols<V>;
    const int64_t rows = blocks * kQueries<V>;
    scores = q + kQueries<V> * kLd;
    keys = scores + kQueries<V> * kLd;
    values = keys + UpTo(UpTo(kKeys, kCols<V>) * p.features, 16);
    sums = values + panels * panel;
    most = sums + rows * wide;
    total = most + UpTo(rows, 16);
    mean = total + UpTo(rows, 16);
    together = mean + UpTo(wide, 16);
    end = together + (p.block == 0 ? 0 : UpTo(kKeys * p.features, 16));
  }
};

template <class V>
int64_t FloatsForward(const AttentionProblem& p, int64_t blocks) {
  return ForwardMemory<V>(p, blocks).end;
}

// What jax's softmax makes of a query that sees nothing: the mean of all
// values.
template <class V, class T>
void MeanOfRows(const T* head, const KeyRows& rows, int64_t count,
                int64_t features, float* mean) {
  constexpr int64_t kLanes = V::kLanes;
  const typename V::Reg share = V::Set(1.f / static_cast<float>(count));
  for (int64_t j = 0; j < features; j += kLanes) {
    const int n = static_cast<int>(Least(kLanes, features - j));
    typename V::Reg sum = V::Zero();
    for (int64_t i = 0; i < count; ++i)
      sum = sum + V::Load(head + rows.At(i) + j, n);
    V::Store(mean + j, sum * share);
  }
}

// One block of scores, which are still to be multiplied with `factor`, to
// powers; what a query's largest score and sum become, and by what its sums so
// far are to be multiplied.
template <class V, class A>
void Softmax(const AttentionTask& task, const QueryBlock& queries,
             const Lengths& lengths, int64_t k0, const SeenKeys& block,
             float factor, float* scores, float* most, float* total,
             float* factors) {
  constexpr int64_t kLanes = V::kLanes;
  float sums[kQueries<V> + kLanes];
  for (int64_t r = 0; r < queries.count; ++r) {
    float* row = scores + r * kLd;
    const RowOfScores seen = FinishScores<V>(
        task, queries.group, queries.first + r, lengths, k0, block, row);
    const float before = most[r];
    float shift = before;
    if (seen.begin < seen.end) {
      const float largest = LargestOf<V>(row, seen.begin, seen.end);
      shift = std::max(factor * largest, before);
    }
    sums[r] = A::Powers(row, {seen.begin, seen.end}, block, factor, shift);
    most[r] = shift;
    factors[r] = before - shift;
  }
  for (int64_t r = 0; r < queries.count; r += kLanes) {
    const int n = static_cast<int>(Least(kLanes, queries.count - r));
    const typename V::Reg factor = Power<V>(V::Load(factors + r, n));
    V::Store(factors + r, factor);
    V::Store(total + r, V::Load(total + r, n) * factor + V::Load(sums + r, n),
             n);
  }
}

// What queries have summed up, in rows of `wide`, to the results. The mean of
// all values is made where it is needed first.
template <class V, class T>
void FinishQueries(const AttentionTask& task, const QueryBlock& queries,
                   const Lengths& lengths, int64_t wide, const float* sums,
                   const float* most, const float* total, float* mean,
                   bool* mean_known) {
  constexpr int64_t kLanes = V::kLanes;
  const AttentionProblem& p = task.problem;
  for (int64_t r = 0; r < queries.count; ++r) {
    const int64_t t = queries.first + r;
    T* y = static_cast<T*>(task.buffers.y) +
           p.y.At(task.batch, task.head, queries.group, t);
    const bool nothing = total[r] == 0;
    task.buffers.sums[p.RowAt(task.batch, task.head, queries.group, t)] =
        nothing ? RowSum{kNothingSeen, 0} : RowSum{most[r], std::log(total[r])};
    const float* from = sums + r * wide;
    float factor = 1 / total[r];
    if (nothing) {
      if (!*mean_known) {
        MeanOfRows<V>(
            static_cast<const T*>(task.buffers.v) + p.v.At(0, task.head, 0, 0),
            KeyRows(p, task.buffers, task.batch), p.keys, p.features, mean);
        *mean_known = true;
      }
      from = mean;
      factor = 1;
    }
    const bool empty = t >= lengths.queries;
    for (int64_t j = 0; j < p.features; j += kLanes) {
      const int n = static_cast<int>(Least(kLanes, p.features - j));
      const typename V::Reg value =
          empty ? V::Zero() : V::Load(from + j) * V::Set(factor);
      V::Store(y + j, value, n);
    }
  }
}

template <class V, class... Rest>
void FinishQueriesOf(const AttentionTask& task, Rest... rest) {
  const DType type = task.problem.type;
  if (type == DType::kBF16) return FinishQueries<V, BF16>(task, rest...);
  if (type == DType::kF16) return FinishQueries<V, F16>(task, rest...);
  FinishQueries<V, float>(task, rest...);
}

template <class V, class A, class T>
void ForwardOf(const AttentionTask& task) {
  const AttentionProblem& p = task.problem;
  const int64_t blocks = task.last - task.first;
  const ForwardMemory<V> at(p, blocks);
  const Lengths lengths = LengthsOf(p, task.buffers, task.batch);
  const auto* q = static_cast<const T*>(task.buffers.q);
  const T* k =
      static_cast<const T*>(task.buffers.k) + p.k.At(0, task.head, 0, 0);
  const T* v =
      static_cast<const T*>(task.buffers.v) + p.v.At(0, task.head, 0, 0);
  const KeyRows key_rows(p, task.buffers, task.batch);
  float* const memory = task.memory;
  float* const scores = memory + at.scores;
  std::fill_n(memory + at.most, blocks * kQueries<V>, kLeastScore);
  std::fill_n(memory + at.total, blocks * kQueries<V>, 0.f);
  float factors[kQueries<V> + V::kLanes];
  const int64_t slots = UpTo(p.features, A::kStep) / A::kDepth;
  // Scores to which nothing is added get their factor where powers are made.
  const bool late = !A::kFactors && !p.bias.present && p.scale > 0;
  for (int64_t k0 = 0; k0 < lengths.keys; k0 += kKeys) {
    const int64_t count = Least(kKeys, lengths.keys - k0);
    bool packed = false;
    for (int64_t i = 0; i < blocks; ++i) {
      const QueryBlock queries = BlockAt(p, kQueries<V>, task.first + i);
      const SeenKeys all = SeenByAny(p, queries.first, queries.count, lengths);
      const SeenKeys some = InBlock(all, k0, count);
      if (some.begin == some.end) continue;
      const SeenKeys seen = WholeSteps<A>(some);
      if (!packed) {
        const Rows<T> keys =
            Together(key_rows, k, k0, count, p.features, memory + at.together);
        A::PackTransposed(keys.first, keys.ld, count, p.features,
                          memory + at.keys);
        const Rows<T> values =
            Together(key_rows, v, k0, count, p.features, memory + at.together);
        A::PackRows(values.first, values.ld, count, p.features,
                    memory + at.values, at.panel);
        packed = true;
      }
      A::CopyRows(
          q + p.q.At(task.batch, task.head, queries.group, queries.first),
          p.q.row, queries.count, p.features, p.scale, memory + at.q);
      const int64_t j0 = seen.begin / kCols<V> * kCols<V>;
      Multiply<V, A, false>(
          queries.count, kCols<V> * slots, seen.end - j0,
          {memory + at.q, memory + at.keys + j0 * slots, slots, scores + j0,
           kLd, false, nullptr, late ? 1 : p.scale});
      const int64_t row = i * kQueries<V>;
      Softmax<V, A>(task, queries, lengths, k0, seen, late ? p.scale : 1,
                    scores, memory + at.most + row, memory + at.total + row,
                    factors);
      // Of the first block that it sees there is nothing to add to.
      const bool add = all.begin < k0;
      Multiply<V, A, false>(
          queries.count, at.panel, p.features,
          {scores + seen.begin / A::kDepth,
           memory + at.values + seen.begin / A::kDepth * kCols<V>,
           (seen.end - seen.begin) / A::kDepth,
           memory + at.sums + row * at.wide, at.wide, add, factors});
    }
  }
  bool mean_known = false;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t row = i * kQueries<V>;
    FinishQueries<V, T>(task, BlockAt(p, kQueries<V>, task.first + i), lengths,
                        at.wide, memory + at.sums + row * at.wide,
                        memory + at.most + row, memory + at.total + row,
                        memory + at.mean, &mean_known);
  }
}

template <class V>
void Forward(const AttentionTask& task) {
  using A = Widened<V>;
  if (task.problem.type == DType::kBF16) return ForwardOf<V, A, BF16>(task);
  if (task.problem.type == DType::kF16) return ForwardOf<V, A, F16>(task);
  ForwardOf<V, A, float>(task);
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_FORWARD_H_
