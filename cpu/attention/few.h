// SPDX-License-Identifier: Apache-2.0
//
// Attention of a few queries, such as the one that generates: keys and values
// come from memory once, as they lie, for all queries that share them. Where
// heads are fewer than threads, keys are cut into parts, whose sums are joined
// (Flash-Decoding, Dao et al. 2023).
#ifndef JAX_LAYOUT_CPU_ATTENTION_FEW_H_
#define JAX_LAYOUT_CPU_ATTENTION_FEW_H_

#include <algorithm>
#include <cstdint>

#include "cpu/attention/forward.h"

namespace jax_layout {
namespace {

// Keys whose scores are made at a time, at most, and a row of those.
constexpr int64_t kStrip = 64, kStripLd = kStrip + 16;
// Keys of a strip, of all heads that are read together, and as many values are
// in L2.
template <class V>
constexpr int64_t kStripBytes = V::kLanes == 16 ? 128 << 10 : 64 << 10;

// What a part has of its queries, in floats from its beginning.
template <class V>
struct FewSums {
  int64_t wide, sums = 0, most, total, end;

  explicit FewSums(const AttentionProblem& p) {
    wide = UpTo(p.features, V::kLanes);
    most = QueriesOfHead(p) * wide;
    total = most + kFewQueries;
    end = UpTo(total + kFewQueries, 16);
  }
};

template <class V>
int64_t FloatsOfPart(const AttentionProblem& p) {
  return FewSums<V>(p).end;
}

// Queries, and scores, of each head.
template <class V>
int64_t FloatsFew(const AttentionProblem& p) {
  return kFewQueries * (UpTo(p.features, V::kLanes) + kStripLd);
}

// Where the keys of a strip lie: one after another, or listed.
struct EveryRow {
  int64_t first, ld;
  int64_t At(int64_t i) const { return first + i * ld; }
};
struct ListedRows {
  const int64_t* at;
  int64_t At(int64_t i) const { return at[i]; }
};

// A line of memory, in the parts of one that a step may ask for.
constexpr int64_t kLine = 1 << 16;

// Asks memory for rows a line at a time, in the order in which they lie, as it
// and the processor's own prefetching like it best, and evenly: a step for
// every four vectors that are read, or one for all of several queries. Into L2:
// L1 has no room for a strip, and no more misses at a time than what is read
// now needs.
template <class T, class R>
class AheadOfRows {
 public:
  AheadOfRows(const T* first, const R& rows, int64_t count, int64_t elements)
      : first_(first),
        rows_(rows),
        count_(count),
        lines_((elements * static_cast<int64_t>(sizeof(T)) + 63) / 64) {
    Next();
  }

  JAX_LAYOUT_INLINE void Ask(int64_t parts) {
    asked_ += parts;
    for (; asked_ >= kLine && left_ > 0; asked_ -= kLine) {
      __builtin_prefetch(at_, 0, 2);
      at_ += 64;
      if (--left_ == 0) Next();
    }
  }
  int64_t lines_of_row() const { return lines_; }

 private:
  JAX_LAYOUT_INLINE void Next() {
    if (row_ == count_) return;
    at_ = reinterpret_cast<const char*>(first_ + rows_.At(row_++));
    left_ = lines_;
  }

  const T* first_;
  R rows_;
  int64_t count_, lines_, row_ = 0, left_ = 0, asked_ = 0;
  const char* at_ = nullptr;
};

// Stores the sums of kLanes vectors, for as many keys of kRows queries each.
template <class V, int kRows>
JAX_LAYOUT_INLINE void StoreSums(typename V::Reg all, float* scores) {
  constexpr int kKeysAtOnce = V::kLanes / kRows;
  if constexpr (kRows == 1) {
    V::Store(scores, all);
  } else {
    float sums[V::kLanes];
    V::Store(sums, all);
    for (int r = 0; r < kRows; ++r) {
      std::copy_n(sums + r * kKeysAtOnce, kKeysAtOnce, scores + r * kStripLd);
    }
  }
}

// Products of kRows queries with the keys of a strip: kLanes sums at a time.
template <class V, class T, int kRows, class R>
void FewScores(const float* q, int64_t wide, const T* k, const R& rows,
               int64_t count, int64_t features, AheadOfRows<T, R>* ahead,
               int64_t lines, float* scores) {
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes, kKeysAtOnce = kLanes / kRows;
  const int64_t whole = features / kLanes * kLanes;
  const int tail = static_cast<int>(features - whole);
  // Keys of a step.
  constexpr int64_t kStep = kRows == 1 ? Least(4, kLanes) : kKeysAtOnce;
  const int64_t asked = lines * kStep * kLanes / Most(kLanes, whole);
  for (int64_t j = 0; j < count; j += kKeysAtOnce) {
    const T* row[kKeysAtOnce];
    Reg sum[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kKeysAtOnce; ++i) {
      row[i] = k + rows.At(Least(j + i, count - 1));
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sum[i] = V::Zero();
    for (int64_t h = 0; h < whole; h += kLanes) {
      if constexpr (kRows > 1) ahead->Ask(asked);
      Reg left[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) left[r] = V::Load(q + r * wide + h);
#pragma GCC unroll 16
      for (int i = 0; i < kKeysAtOnce; ++i) {
        if (kRows == 1 && i % kStep == 0) ahead->Ask(asked);
        const Reg right = V::Load(row[i] + h);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sum[r * kKeysAtOnce + i] = sum[r * kKeysAtOnce + i] + left[r] * right;
        }
      }
    }
    if (tail > 0) {
      for (int i = 0; i < kKeysAtOnce; ++i) {
        const Reg right = V::Load(row[i] + whole, tail);
        for (int r = 0; r < kRows; ++r) {
          sum[r * kKeysAtOnce + i] =
              sum[r * kKeysAtOnce + i] + V::Load(q + r * wide + whole) * right;
        }
      }
    }
    StoreSums<V, kRows>(V::SumOfEach(sum), scores + j);
  }
}

// Sums of values by the powers of kRows queries, for kVectors of features.
template <class V, class T, int kRows, int kVectors, class R>
void FewValues(const float* powers, const T* v, const R& rows, int64_t count,
               int tail, const float* factors, AheadOfRows<T, R>* ahead,
               int64_t lines, float* sums, int64_t wide) {
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes;
  Reg sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      sum[r][i] = V::Load(sums + r * wide + i * kLanes) * V::Set(factors[r]);
    }
  }
  constexpr int kStep = kRows == 1 ? 4 : kVectors;
  const int64_t asked = lines * Least(kStep, kVectors) / kVectors;
  for (int64_t j = 0; j < count; ++j) {
    const T* row = v + rows.At(j);
    if constexpr (kRows > 1) ahead->Ask(asked);
    Reg left[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) left[r] = V::Set(powers[r * kStripLd + j]);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if (kRows == 1 && i % kStep == 0) ahead->Ask(asked);
      const Reg right = i == kVectors - 1 ? V::Load(row + i * kLanes, tail)
                                          : V::Load(row + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][i] = sum[r][i] + left[r] * right;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      V::Store(sums + r * wide + i * kLanes, sum[r][i]);
    }
  }
}

// The same for all features, by as many vectors as there are registers for, and
// then by half as many, until all are done.
template <class V, class T, int kRows, int kVectors, class R>
void FewValuesFrom(int64_t j, const float* powers, const T* v, const R& rows,
                   int64_t count, int64_t features, const float* factors,
                   AheadOfRows<T, R>* ahead, int64_t lines, float* sums,
                   int64_t wide) {
  constexpr int kLanes = V::kLanes;
  for (; features - j > (kVectors - 1) * kLanes; j += kVectors * kLanes) {
    const int64_t last = features - j - (kVectors - 1) * kLanes;
    FewValues<V, T, kRows, kVectors>(
        powers, v + j, rows, count, static_cast<int>(Least(kLanes, last)),
        factors, ahead,
        lines * Least(kVectors * kLanes, features - j) / features, sums + j,
        wide);
  }
  if constexpr (kVectors > 1) {
    FewValuesFrom<V, T, kRows, kVectors / 2>(
        j, powers, v, rows, count, features, factors, ahead, lines, sums, wide);
  }
}

template <class V, int kRows>
constexpr int kFewVectors =
    kRows == 1 ? 8 : (V::kRegisters == 32 ? 16 : 8) / kRows;

// Calls f.operator()<rows>(first) for groups of four, two and one of `count`.
template <class F>
JAX_LAYOUT_INLINE void InFours(int64_t count, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) f.template operator()<4>(r);
  if (r + 2 <= count) {
    f.template operator()<2>(r);
    r += 2;
  }
  if (r < count) f.template operator()<1>(r);
}

// Rows of a strip: whole vectors of scores.
template <class V, class T>
int64_t StripOf(const AttentionProblem& p, int64_t heads) {
  const int64_t row = heads * p.features * static_cast<int64_t>(sizeof(T));
  return std::clamp<int64_t>(kStripBytes<V> / row / 16 * 16, 16, kStrip);
}

// How keys and values are multiplied: as float32. Another arithmetic offers the
// same; one that takes all queries at once has Scores and Values of `count`
// queries in place of those of kRows.
template <class V, class Element>
struct FewWidened {
  using T = Element;
  static constexpr bool kAtOnce = false;

  // Query `r`, to what Scores reads.
  static void Copy(const T* from, int64_t features, float factor, float* q,
                   int64_t r, int64_t wide) {
    float* to = q + r * wide;
    for (int64_t j = 0; j < features; j += V::kLanes) {
      const int n = static_cast<int>(Least(V::kLanes, features - j));
      V::Store(to + j, V::Set(factor) * V::Load(from + j, n));
    }
  }
  template <int kRows, class R>
  static void Scores(const float* q, int64_t wide, const T* k, const R& rows,
                     int64_t count, int64_t features, float /*factor*/,
                     AheadOfRows<T, R>* ahead, int64_t lines, float* scores) {
    FewScores<V, T, kRows>(q, wide, k, rows, count, features, ahead, lines,
                           scores);
  }
  // Powers of e of scores less `shift`, of `count` keys of which some are seen,
  // to what Values reads, and their sum.
  static float Powers(float* row, const SeenKeys& seen, int64_t count,
                      float shift) {
    return Widened<V>::Powers(row, seen, {0, count}, 1, shift);
  }
  template <int kRows, class R>
  static void Values(const float* powers, const T* v, const R& rows,
                     int64_t count, int64_t features, const float* factors,
                     AheadOfRows<T, R>* ahead, int64_t lines, float* sums,
                     int64_t wide) {
    FewValuesFrom<V, T, kRows, kFewVectors<V, kRows>>(
        0, powers, v, rows, count, features, factors, ahead, lines, sums, wide);
  }
  // Sums of values, to the order of features.
  static void Order(float*, int64_t) {}
};

// Powers of a head's queries for the keys of a strip, and by what their sums so
// far are to be multiplied.
template <class V, class A>
void FewPowers(const AttentionTask& task, const Lengths& lengths, int64_t k0,
               int64_t count, float* scores, float* most, float* total,
               float* factors) {
  const AttentionProblem& p = task.problem;
  for (int64_t r = 0; r < QueriesOfHead(p); ++r) {
    float* row = scores + r * kStripLd;
    const RowOfScores seen = FinishScores<V>(task, r / p.queries, r % p.queries,
                                             lengths, k0, {0, count}, row);
    float shift = most[r];
    if (seen.begin < seen.end) {
      shift = std::max(LargestOf<V>(row, seen.begin, seen.end), shift);
    }
    const float sum = A::Powers(row, {seen.begin, seen.end}, count, shift);
    factors[r] = shift != most[r] ? std::exp(most[r] - shift) : 1;
    most[r] = shift;
    total[r] = total[r] * factors[r] + sum;
  }
}

template <class V, class A>
void FewOf(const AttentionFewTask& task) {
  using T = typename A::T;
  const AttentionProblem& p = task.problem;
  const FewSums<V> at(p);
  const int64_t rows = QueriesOfHead(p), features = p.features;
  const int64_t head_floats = FloatsFew<V>(p);
  const float factor = p.scale;
  const Lengths lengths = LengthsOf(p, task.buffers, task.batch);
  const SeenKeys all = SeenByAny(p, 0, p.queries, lengths);
  for (int64_t i = 0; i < task.heads; ++i) {
    float* part = task.Part(i);
    std::fill_n(part, at.most, 0.f);
    std::fill_n(part + at.most, rows, kLeastScore);
    std::fill_n(part + at.total, rows, 0.f);
    for (int64_t r = 0; r < rows; ++r) {
      const T* from =
          static_cast<const T*>(task.buffers.q) +
          p.q.At(task.batch, task.head + i, r / p.queries, r % p.queries);
      A::Copy(from, features, factor, task.memory + i * head_floats, r,
              at.wide);
    }
  }
  const T* k =
      static_cast<const T*>(task.buffers.k) + p.k.At(0, task.head, 0, 0);
  const T* v =
      static_cast<const T*>(task.buffers.v) + p.v.At(0, task.head, 0, 0);
  const KeyRows key_rows(p, task.buffers, task.batch);
  const int64_t strip = StripOf<V, T>(p, task.heads);
  const int64_t strips = (all.end - all.begin + strip - 1) / strip;
  const int64_t begin = all.begin + strips * task.part / task.parts * strip;
  const int64_t end =
      Least(all.end, all.begin + strips * (task.part + 1) / task.parts * strip);
  // Passes over a strip, in which the next is asked for, with some to spare.
  const int64_t of_head = A::kAtOnce ? 1 : rows / 4 + rows % 4 / 2 + rows % 2;
  const int64_t passes = task.heads * of_head;
  const int64_t elements = (task.heads - 1) * p.k.head + features;
  const auto sum = [&](int64_t k0, int64_t count, const auto& now, int64_t next,
                       const auto& then) {
    AheadOfRows values(v, now, count, elements);
    AheadOfRows keys(k, then, next, elements);
    const int64_t lines = values.lines_of_row() * kLine / passes * 17 / 16;
    for (int64_t i = 0; i < task.heads; ++i) {
      const float* q = task.memory + i * head_floats;
      float* scores = task.memory + i * head_floats + kFewQueries * at.wide;
      const T* head = k + i * p.k.head;
      if constexpr (A::kAtOnce) {
        A::Scores(rows, q, head, now, count, features, factor, &values, lines,
                  scores);
      } else {
        InFours(rows, [&]<int kRows>(int64_t r) {
          A::template Scores<kRows>(q + r * at.wide, at.wide, head, now, count,
                                    features, factor, &values, lines,
                                    scores + r * kStripLd);
        });
      }
    }
    for (int64_t i = 0; i < task.heads; ++i) {
      float* scores = task.memory + i * head_floats + kFewQueries * at.wide;
      float* part = task.Part(i);
      float factors[kFewQueries];
      FewPowers<V, A>(
          {p, task.buffers, task.batch, task.head + i, 0, 0, nullptr}, lengths,
          k0, count, scores, part + at.most, part + at.total, factors);
      const T* head = v + i * p.v.head;
      if constexpr (A::kAtOnce) {
        A::Values(rows, scores, head, now, count, features, factors, &keys,
                  lines, part, at.wide);
      } else {
        InFours(rows, [&]<int kRows>(int64_t r) {
          A::template Values<kRows>(scores + r * kStripLd, head, now, count,
                                    features, factors + r, &keys, lines,
                                    part + r * at.wide, at.wide);
        });
      }
    }
  };
  // Where the keys of a strip lie, and those of the next.
  int64_t listed[2][kStrip];
  const auto list = [&](int64_t first, int64_t n, int64_t* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = key_rows.At(first + i);
  };
  if (key_rows.in_blocks()) list(begin, Least(strip, end - begin), listed[0]);
  for (int64_t k0 = begin, turn = 0; k0 < end; k0 += strip, turn = 1 - turn) {
    const int64_t count = Least(strip, end - k0), k1 = k0 + count;
    const int64_t next = Least(strip, end - k1);
    if (key_rows.in_blocks()) {
      list(k1, next, listed[1 - turn]);
      sum(k0, count, ListedRows{listed[turn]}, next,
          ListedRows{listed[1 - turn]});
    } else {
      const int64_t ld = key_rows.row();
      sum(k0, count, EveryRow{key_rows.At(k0), ld}, next,
          EveryRow{key_rows.At(k1), ld});
    }
  }
  for (int64_t i = 0; i < task.heads; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      A::Order(task.Part(i) + r * at.wide, features);
    }
  }
}

template <class V>
void Few(const AttentionFewTask& task) {
  const DType type = task.problem.type;
  if (type == DType::kBF16) return FewOf<V, FewWidened<V, BF16>>(task);
  if (type == DType::kF16) return FewOf<V, FewWidened<V, F16>>(task);
  FewOf<V, FewWidened<V, float>>(task);
}

// Joins the parts of a head, into the first, and stores what they make.
template <class V>
void FinishFew(const AttentionTask& task, float* parts, int64_t count) {
  const AttentionProblem& p = task.problem;
  const FewSums<V> at(p);
  const int64_t rows = QueriesOfHead(p);
  for (int64_t r = 0; r < rows; ++r) {
    float most = kLeastScore, total = 0;
    for (int64_t i = 0; i < count; ++i) {
      most = std::max(parts[i * at.end + at.most + r], most);
    }
    for (int64_t i = 0; i < count; ++i) {
      float* part = parts + i * at.end;
      const float factor = std::exp(part[at.most + r] - most);
      total += factor * part[at.total + r];
      for (int64_t j = 0; j < at.wide; j += V::kLanes) {
        float* to = parts + r * at.wide + j;
        const typename V::Reg sum =
            V::Load(part + r * at.wide + j) * V::Set(factor);
        V::Store(to, i == 0 ? sum : V::Load(to) + sum);
      }
    }
    parts[at.most + r] = most;
    parts[at.total + r] = total;
  }
  const Lengths lengths = LengthsOf(p, task.buffers, task.batch);
  float mean[kMostFeatures + V::kLanes];
  bool known = false;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t r = g * p.queries;
    const QueryBlock queries = {g, 0, p.queries};
    FinishQueriesOf<V>(task, queries, lengths, at.wide, parts + r * at.wide,
                       parts + at.most + r, parts + at.total + r, mean, &known);
  }
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_FEW_H_
