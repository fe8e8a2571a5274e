// SPDX-License-Identifier: Apache-2.0
//
// Gradients of attention by blocks (Dao, FlashAttention-2, arXiv:2307.08691,
// algorithm 2): the powers p are made again from what they were divided by,
// and with the gradients dy of the result
//
//   dv = p^T dy,  ds = p (dy v^T - rowsum(dy y)),  dq = scale ds k,
//   dk = scale ds^T q,  dbias = ds, summed over axes that the bias lacks
//
// A task adds up the keys of one head for its own queries, in a fixed order.
#ifndef JAX_LAYOUT_CPU_ATTENTION_BACKWARD_H_
#define JAX_LAYOUT_CPU_ATTENTION_BACKWARD_H_

#include <algorithm>
#include <cstdint>

#include "cpu/attention/few.h"
#include "cpu/attention/forward.h"

namespace jax_layout {
namespace {

template <class V>
struct BackwardMemory {
  int64_t wide;  // floats of a row of sums
  int64_t key_panel, query_panel;
  int64_t q = 0, dy, powers, ds;     // left operands
  int64_t q_panels, dy_panels;       // right operands of sums over queries
  int64_t keys, values, key_rows;    // right operands of scores and of dq
  int64_t powers_across, ds_across;  // where another k is along
  int64_t dk, dv, dq, most, log, dot, mean, end;

  BackwardMemory(const AttentionProblem& p, int64_t blocks) {
    wide = UpTo(p.features, V::kLanes);
    key_panel = kKeys * kCols<V>;
    query_panel = kQueries<V> * kCols<V>;
    const int64_t panels = UpTo(p.features, kCols<V>) / kCols<V>;
    const int64_t rows = blocks * kQueries<V>;
    const int64_t left = kQueries<V> * kLd;
    const int64_t transposed = UpTo(UpTo(kKeys, kCols<V>) * p.features, 16);
    dy = q + left;
    powers = dy + left;
    ds = powers + left;
    q_panels = ds + left;
    dy_panels = q_panels + panels * query_panel;
    keys = dy_panels + panels * query_panel;
    values = keys + transposed;
    key_rows = values + transposed;
    powers_across = key_rows + panels * key_panel;
    ds_across = powers_across + left;
    dk = ds_across + left;
    dv = dk + kKeys * wide;
    dq = dv + kKeys * wide;
    most = dq + rows * wide;
    log = most + UpTo(rows, 16);
    dot = log + UpTo(rows, 16);
    mean = dot + UpTo(rows, 16);
    end = mean + UpTo(wide, 16);
  }
};

template <class V>
int64_t FloatsBackward(const AttentionProblem& p, int64_t blocks) {
  return BackwardMemory<V>(p, blocks).end;
}

// What is known of each query: its largest score and the logarithm of its sum,
// and rowsum(dy y). Gradients of queries that see nothing go to all values
// alike.
template <class V, class T>
void PrepareQueries(const AttentionGradientTask& task, const Lengths& lengths,
                    const QueryBlock& queries, float* most, float* log,
                    float* dot, float* mean) {
  constexpr int64_t kLanes = V::kLanes;
  const AttentionProblem& p = task.problem;
  const float share = 1.f / static_cast<float>(p.keys);
  for (int64_t r = 0; r < queries.count; ++r) {
    const int64_t t = queries.first + r;
    const int64_t at = p.y.At(task.batch, task.head, queries.group, t);
    const T* y = static_cast<const T*>(task.buffers.forward.y) + at;
    const T* dy = static_cast<const T*>(task.buffers.dy) + at;
    const RowSum sum =
        task.buffers.forward
            .sums[p.RowAt(task.batch, task.head, queries.group, t)];
    most[r] = std::max(sum.most, kLeastScore);
    log[r] = sum.log;
    typename V::Reg products = V::Zero();
    for (int64_t j = 0; j < p.features; j += kLanes) {
      const int n = static_cast<int>(Least(kLanes, p.features - j));
      products = products + V::Load(y + j, n) * V::Load(dy + j, n);
    }
    dot[r] = V::Sum(products);
    if (sum.most == kNothingSeen && t < lengths.queries) {
      for (int64_t j = 0; j < p.features; j += kLanes) {
        const int n = static_cast<int>(Least(kLanes, p.features - j));
        V::Store(mean + j,
                 V::Load(mean + j) + V::Set(share) * V::Load(dy + j, n));
      }
    }
  }
}

// powers = e^(scores - most - log), ds = powers (ds - dot). A score that
// rounding makes larger here than it was is the largest: were it 1e9, it would
// be so by 64.
template <class V>
void GradientOfScores(const AttentionGradientTask& task,
                      const QueryBlock& queries, const Lengths& lengths,
                      int64_t k0, const SeenKeys& block, const float* most,
                      const float* log, const float* dot, float* powers,
                      float* ds) {
  constexpr int64_t kLanes = V::kLanes;
  for (int64_t r = 0; r < queries.count; ++r) {
    float* row = powers + r * kLd;
    float* d = ds + r * kLd;
    const RowOfScores seen =
        FinishScores<V>(task.Scores(), queries.group, queries.first + r,
                        lengths, k0, block, row);
    const typename V::Reg largest = V::Set(most[r]), less = V::Set(log[r]);
    for (int64_t j = seen.begin; j < seen.end; j += kLanes) {
      const typename V::Reg score =
          V::Min(V::Zero(), V::Load(row + j) - largest);
      V::Store(row + j, Power<V>(score - less));
    }
    const typename V::Reg by = V::Set(dot[r]);
    for (int64_t j = block.begin / kLanes * kLanes; j < block.end;
         j += kLanes) {
      V::Store(d + j, V::Load(row + j) * (V::Load(d + j) - by));
    }
  }
}

// Adds gradients of scores to those of the bias.
template <class V>
void AddToBias(const AttentionGradientTask& task, const QueryBlock& queries,
               int64_t k0, const SeenKeys& seen, const float* ds) {
  constexpr int64_t kLanes = V::kLanes;
  const BiasSums at(task.problem);
  for (int64_t r = 0; r < queries.count; ++r) {
    const float* row = ds + r * kLd;
    float* to = task.dbias + queries.group * at.group +
                (queries.first + r) * at.query + k0 * at.key;
    typename V::Reg total = V::Zero();
    for (int64_t j = seen.begin; j < seen.end; j += kLanes) {
      const int n = static_cast<int>(Least(kLanes, seen.end - j));
      const typename V::Reg d = V::Load(row + j, n);
      if (at.key == 0) {
        total = total + d;
      } else {
        V::Store(to + j, V::Load(to + j, n) + d, n);
      }
    }
    if (at.key == 0) *to += V::Sum(total);
  }
}

// Rows of sums to an array; or, where others add to the same rows, as they are.
template <class V, class T>
void StoreRows(const float* sums, int64_t wide, int64_t rows, int64_t features,
               float factor, T* to, int64_t ld) {
  constexpr int64_t kLanes = V::kLanes;
  const typename V::Reg times = V::Set(factor);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < features; j += kLanes) {
      const int n = static_cast<int>(Least(kLanes, features - j));
      V::Store(to + i * ld + j, V::Load(sums + i * wide + j) * times, n);
    }
  }
}

template <class V, class A, class T>
void BackwardOf(const AttentionGradientTask& task) {
  const AttentionProblem& p = task.problem;
  const AttentionGradientBuffers& buffers = task.buffers;
  const int64_t blocks = task.last - task.first, features = p.features;
  const BackwardMemory<V> at(p, blocks);
  const AttentionTask scores = task.Scores();
  const Lengths lengths = LengthsOf(p, scores.buffers, task.batch);
  const auto* q = static_cast<const T*>(buffers.forward.q);
  const auto* dy = static_cast<const T*>(buffers.dy);
  const int64_t key_at = p.k.At(task.batch, task.head, 0, 0);
  const int64_t slots = UpTo(features, A::kStep) / A::kDepth;
  const T* k = static_cast<const T*>(buffers.forward.k) + key_at;
  const T* v = static_cast<const T*>(buffers.forward.v) + key_at;
  float* const m = task.memory;
  std::fill_n(m + at.dq, blocks * kQueries<V> * at.wide, 0.f);
  std::fill_n(m + at.mean, at.wide, 0.f);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t row = i * kQueries<V>;
    PrepareQueries<V, T>(task, lengths, BlockAt(p, kQueries<V>, task.first + i),
                         m + at.most + row, m + at.log + row, m + at.dot + row,
                         m + at.mean);
  }
  for (int64_t k0 = 0; k0 < p.keys; k0 += kKeys) {
    const int64_t count = Least(kKeys, p.keys - k0);
    const int64_t there = Most(0, Least(count, lengths.keys - k0));
    std::fill_n(m + at.dk, count * at.wide, 0.f);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(m + at.mean, at.wide, m + at.dv + i * at.wide);
    }
    bool packed = false;
    for (int64_t i = 0; i < blocks; ++i) {
      const QueryBlock queries = BlockAt(p, kQueries<V>, task.first + i);
      const SeenKeys some = InBlock(
          SeenByAny(p, queries.first, queries.count, lengths), k0, there);
      if (some.begin == some.end) continue;
      const SeenKeys seen = WholeSteps<A>(some);
      if (!packed) {
        A::PackTransposed(k + k0 * p.k.row, p.k.row, there, features,
                          m + at.keys);
        A::PackTransposed(v + k0 * p.v.row, p.v.row, there, features,
                          m + at.values);
        A::PackRows(k + k0 * p.k.row, p.k.row, there, features, m + at.key_rows,
                    at.key_panel);
        packed = true;
      }
      const int64_t rows = queries.count;
      const T* queries_at =
          q + p.q.At(task.batch, task.head, queries.group, queries.first);
      const T* dy_at =
          dy + p.y.At(task.batch, task.head, queries.group, queries.first);
      A::CopyRows(queries_at, p.q.row, rows, features, p.scale, m + at.q);
      A::CopyRows(dy_at, p.y.row, rows, features, 1, m + at.dy);
      A::PackRows(queries_at, p.q.row, rows, features, m + at.q_panels,
                  at.query_panel);
      A::PackRows(dy_at, p.y.row, rows, features, m + at.dy_panels,
                  at.query_panel);
      const int64_t j0 = seen.begin / kCols<V> * kCols<V>;
      const int64_t from = seen.begin, width = seen.end - seen.begin;
      const int64_t row = i * kQueries<V>;
      Multiply<V, A, false>(rows, kCols<V> * slots, seen.end - j0,
                            {m + at.q, m + at.keys + j0 * slots, slots,
                             m + at.powers + j0, kLd, false, nullptr, p.scale});
      Multiply<V, A, false>(rows, kCols<V> * slots, seen.end - j0,
                            {m + at.dy, m + at.values + j0 * slots, slots,
                             m + at.ds + j0, kLd, false, nullptr, 1});
      GradientOfScores<V>(task, queries, lengths, k0, seen, m + at.most + row,
                          m + at.log + row, m + at.dot + row, m + at.powers,
                          m + at.ds);
      if (task.dbias != nullptr) {
        AddToBias<V>(task, queries, k0, some, m + at.ds);
      }
      const float* powers = A::NarrowAcross(m + at.powers, rows, from, seen.end,
                                            m + at.powers_across);
      const float* ds =
          A::NarrowAcross(m + at.ds, rows, from, seen.end, m + at.ds_across);
      const int64_t row_slots = UpTo(rows, A::kStep) / A::kDepth;
      const int64_t across = from * A::kAcrossRow;
      // What the last keys are filled up with is no key at all.
      const int64_t keys = Least(width, there - from);
      Multiply<V, A, true>(
          keys, at.query_panel, features,
          {powers + across, m + at.dy_panels, row_slots,
           m + at.dv + from * at.wide, at.wide, true, nullptr});
      Multiply<V, A, true>(
          keys, at.query_panel, features,
          {ds + across, m + at.q_panels, row_slots, m + at.dk + from * at.wide,
           at.wide, true, nullptr});
      for (int64_t r = 0; r < rows; ++r) {
        A::NarrowRow(m + at.ds + r * kLd, from, seen.end);
      }
      Multiply<V, A, false>(
          rows, at.key_panel, features,
          {m + at.ds + from / A::kDepth,
           m + at.key_rows + from / A::kDepth * kCols<V>, width / A::kDepth,
           m + at.dq + row * at.wide, at.wide, true, nullptr});
    }
    if (task.dk != nullptr) {
      StoreRows<V>(m + at.dk, at.wide, count, features, p.scale,
                   task.dk + k0 * features, features);
      StoreRows<V>(m + at.dv, at.wide, count, features, 1,
                   task.dv + k0 * features, features);
    } else {
      StoreRows<V>(m + at.dk, at.wide, count, features, p.scale,
                   static_cast<T*>(buffers.dk) + key_at + k0 * p.k.row,
                   p.k.row);
      StoreRows<V>(m + at.dv, at.wide, count, features, 1,
                   static_cast<T*>(buffers.dv) + key_at + k0 * p.v.row,
                   p.v.row);
    }
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const QueryBlock queries = BlockAt(p, kQueries<V>, task.first + i);
    StoreRows<V>(
        m + at.dq + i * kQueries<V> * at.wide, at.wide, queries.count, features,
        p.scale,
        static_cast<T*>(buffers.dq) +
            p.q.At(task.batch, task.head, queries.group, queries.first),
        p.q.row);
  }
}

template <class V>
void Backward(const AttentionGradientTask& task) {
  using A = Widened<V>;
  if (task.problem.type == DType::kBF16) return BackwardOf<V, A, BF16>(task);
  if (task.problem.type == DType::kF16) return BackwardOf<V, A, F16>(task);
  BackwardOf<V, A, float>(task);
}

// Adds up what several tasks have of the same sums.
template <class V, class T>
void JoinOf(const PartsOfSums& sums) {
  constexpr int64_t kLanes = V::kLanes;
  T* to = static_cast<T*>(sums.to) + sums.at;
  for (int64_t i = 0; i < sums.rows; ++i) {
    for (int64_t j = 0; j < sums.width; j += kLanes) {
      const int n = static_cast<int>(Least(kLanes, sums.width - j));
      const float* from = sums.parts + i * sums.width + j;
      typename V::Reg sum = V::Load(from, n);
      for (int64_t part = 1; part < sums.count; ++part) {
        sum = sum + V::Load(from + part * sums.apart, n);
      }
      V::Store(to + i * sums.ld + j, sum, n);
    }
  }
}

template <class V>
void Join(const PartsOfSums& sums) {
  if (sums.type == DType::kBF16) return JoinOf<V, BF16>(sums);
  if (sums.type == DType::kF16) return JoinOf<V, F16>(sums);
  JoinOf<V, float>(sums);
}

template <class V, auto forward = Forward<V>, auto backward = Backward<V>,
          auto few = Few<V>>
constexpr AttentionKernels kAttention = {
    kQueries<V>, FloatsForward<V>, forward,      FloatsBackward<V>,
    backward,    Join<V>,          FloatsFew<V>, FloatsOfPart<V>,
    few,         FinishFew<V>};

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_BACKWARD_H_
