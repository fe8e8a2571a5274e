// SPDX-License-Identifier: Apache-2.0
#include "cpu/pool/pool.h"

#include <algorithm>
#include <limits>

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

double Reduced(PoolKind kind, double a, double b) {
  if (kind == PoolKind::kSum) return a + b;
  if (std::isnan(a) || std::isnan(b))
    return std::numeric_limits<double>::quiet_NaN();
  return std::max(a, b);
}

void Check(const PoolProblem& p, int threads) {
  const Windows &a = p.windows[0], &b = p.windows[1], &c = p.windows[2];
  const bool sum = p.kind == PoolKind::kSum;
  const DType type = !sum                    ? p.type
                     : p.type == DType::kF64 ? DType::kF64
                                             : DType::kF32;
  Array x(p.type, p.outer * a.extent * b.extent * c.extent * p.inner);
  Array y(type, p.outer * a.out * b.out * c.out * p.inner);
  x.Fill(&random, 100);
  if (random.Flip())
    x.Put(random.Below(x.size), std::numeric_limits<double>::quiet_NaN());
  const auto describe = [&] {
    return Text("pool", Name(p.type), static_cast<int>(p.kind), p.outer,
                p.inner, c.extent, c.out, c.size, c.stride, c.dilation, c.low,
                threads);
  };
  bool ok = Pool(p, x.data(), y.data(), Threads(threads)).ok() &&
            x.memory.Intact() && y.memory.Intact();
  const auto at = [](const Windows& w, int64_t j, int64_t i) {
    const int64_t place = j * w.stride + i * w.dilation - w.low;
    return place >= 0 && place < w.extent ? place : -1;
  };
  const double infinity = std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < y.size && ok; ++k) {
    const int64_t channel = k % p.inner, column = k / p.inner % c.out;
    const int64_t line = k / p.inner / c.out % b.out;
    const int64_t plane = k / p.inner / c.out / b.out % a.out;
    const int64_t outer = k / p.inner / c.out / b.out / a.out;
    double want = sum ? 0 : -infinity;
    for (int64_t i = 0; i < a.size * b.size * c.size; ++i) {
      const int64_t u = at(a, plane, i / c.size / b.size);
      const int64_t v = at(b, line, i / c.size % b.size);
      const int64_t w = at(c, column, i % c.size);
      if (u < 0 || v < 0 || w < 0) continue;
      const int64_t place =
          ((outer * a.extent + u) * b.extent + v) * c.extent + w;
      want = Reduced(p.kind, want, x[place * p.inner + channel]);
    }
    ok = Close(y[k], want, 0);
  }
  Expect(ok, describe);
}

Windows Some(int64_t extent) {
  Windows w;
  w.extent = extent;
  w.size = random.Between(1, 4);
  w.stride = random.Between(1, 3);
  w.dilation = random.Between(1, 2);
  w.low = random.Between(0, 6);
  w.out = random.Between(1, extent / w.stride + 3);
  return w;
}

}  // namespace

void CheckPool() {
  for (DType type : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (PoolKind kind : {PoolKind::kSum, PoolKind::kMax}) {
      for (int i = 0; i < 20; ++i) {
        const int64_t inner = random.Of<int64_t>({1, 3, 8, 16, 33, 300});
        const PoolProblem p{
            random.Between(1, 3),
            inner,
            {Some(random.Between(1, 4)), Some(random.Between(1, 7)),
             Some(random.Between(1, 9))},
            kind,
            type};
        Check(p, static_cast<int>(random.Between(1, 3)));
      }
      // Parts of rows, and more channels than are reduced at a time.
      Check(
          {1, 17, {{}, {3, 2, 2, 1, 1, 0}, {700, 350, 3, 2, 1, 1}}, kind, type},
          2);
      Check({1, 2111, {{}, {2, 2, 2, 1, 1, 1}, {5, 5, 3, 1, 1, 1}}, kind, type},
            3);
    }
  }
}

}  // namespace jax_layout
