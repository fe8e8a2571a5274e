// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

struct Row {
  std::vector<double> p, y;
  double lse = 0;
};

// The powers of a query that sees something, and its result.
Row Plain(const AttentionProblem& p, const Array& q, const Array& k,
          const Array& v, const Array& bias, int64_t b, int64_t head,
          int64_t group, int64_t t) {
  Row row;
  const SeenKeys seen = KeysSeenBy(p, t, p.queries, p.keys);
  double total = 0;
  row.p.resize(p.keys);
  row.y.resize(p.features);
  for (int64_t s = seen.begin; s < seen.end; ++s) {
    double score = 0;
    for (int64_t h = 0; h < p.features; ++h) {
      score += q[p.q.At(b, head, group, t) + h] * k[p.k.At(b, head, 0, s) + h];
    }
    score *= p.scale;
    if (p.bias.present) {
      score += bias[p.bias.At(b, head, group, t) + s * p.bias.key];
    }
    total += row.p[s] = std::exp(score);
  }
  for (int64_t s = seen.begin; s < seen.end; ++s) {
    row.p[s] /= total;
    for (int64_t h = 0; h < p.features; ++h) {
      row.y[h] += row.p[s] * v[p.v.At(b, head, 0, s) + h];
    }
  }
  row.lse = std::log(total);
  return row;
}

void Check(const AttentionProblem& p) {
  const int64_t rows = p.Rows(), keys = p.batch * p.heads * p.keys;
  const int64_t scores = p.groups * p.queries * p.keys;
  Array q(p.type, rows * p.features), k(p.type, keys * p.features);
  Array v(p.type, keys * p.features), y(p.type, rows * p.features);
  Array dy(p.type, rows * p.features), dq(p.type, rows * p.features);
  Array dk(p.type, keys * p.features), dv(p.type, keys * p.features);
  Array bias(DType::kF32, scores);
  std::vector<RowSum> sums(rows);
  for (Array* x : {&q, &k, &v, &dy, &bias}) x->Fill(&random);
  const AttentionGradientBuffers buffers = {
      {q.data(), k.data(), v.data(), bias.data(), nullptr, nullptr, nullptr,
       y.data(), sums.data()},
      dy.data(),
      dq.data(),
      dk.data(),
      dv.data()};
  bool ok = Attention(p, buffers.forward, Threads(2)).ok() &&
            AttentionGradient(p, buffers, Threads(2)).ok();
  std::vector<double> to_q(rows * p.features), to_k(keys * p.features);
  std::vector<double> to_v(keys * p.features);
  const double tolerance = 20 * Epsilon(p.type);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t t = i % p.queries, group = i / p.queries % p.groups;
    const int64_t head = i / p.queries / p.groups % p.heads;
    const int64_t b = i / p.queries / p.groups / p.heads;
    const Row row = Plain(p, q, k, v, bias, b, head, group, t);
    const int64_t at = p.y.At(b, head, group, t);
    const double lse = sums[i].most + sums[i].log;
    ok = ok && Close(lse, row.lse, 1e-5);
    double dot = 0;
    for (int64_t h = 0; h < p.features; ++h) {
      ok = ok && Close(y[at + h], row.y[h], tolerance);
      dot += row.y[h] * dy[at + h];
    }
    for (int64_t s = 0; s < p.keys; ++s) {
      const int64_t key = p.k.At(b, head, 0, s);
      double dp = 0;
      for (int64_t h = 0; h < p.features; ++h) dp += dy[at + h] * v[key + h];
      const double ds = row.p[s] * (dp - dot) * p.scale;
      for (int64_t h = 0; h < p.features; ++h) {
        to_q[at + h] += ds * k[key + h];
        to_k[key + h] += ds * q[at + h];
        to_v[key + h] += row.p[s] * dy[at + h];
      }
    }
  }
  // Sums of many rounded products, some of which cancel.
  const double loose = 100 * Epsilon(p.type);
  for (int64_t i = 0; i < rows * p.features; ++i) {
    ok = ok && Close(dq[i], to_q[i], loose);
  }
  for (int64_t i = 0; i < keys * p.features; ++i) {
    ok = ok && Close(dk[i], to_k[i], loose) && Close(dv[i], to_v[i], loose);
  }
  for (const Array* x : {&y, &dq, &dk, &dv}) {
    ok = ok && x->memory.Intact();
  }
  Expect(ok, [&] {
    return Text("attention", Name(p.type), p.batch, p.heads, p.groups,
                p.queries, p.keys, p.features, p.causal, p.left, p.right);
  });
}

}  // namespace

void CheckAttention() {
  if (BestIsa() ==
      Isa::kPortable) {  // where there is no kernel, nobody says so
    AttentionProblem p;
    p.features = 8;
    Expect(!AttentionSupports(p),
           [] { return Text("attention is supported"); });
    return;
  }
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t queries : {1, 3, 60}) {
      for (int64_t keys : {1, 5, 70, 270}) {
        for (int64_t features : {8, 13, 50}) {
          AttentionProblem p;
          p.type = type;
          p.batch = random.Between(1, 2);
          p.heads = random.Between(1, 2);
          p.groups = random.Between(1, 2);
          p.queries = queries;
          p.keys = keys;
          p.features = features;
          p.scale = 0.125;
          p.causal = random.Flip();
          // Every query sees something.
          if (queries <= keys) p.left = random.Of<int64_t>({-1, 0, 9});
          const int64_t wide = p.groups * features;
          p.q =
              p.y = {queries * p.heads * wide, p.heads * wide, wide, features};
          p.k = p.v = {keys * p.heads * features, features, keys * features, 0};
          if (random.Flip()) {
            p.bias = {true, DType::kF32, 0, 0, queries * keys, keys, 1};
          }
          Check(p);
        }
      }
    }
  }
}

}  // namespace jax_layout
