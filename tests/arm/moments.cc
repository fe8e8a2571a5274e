// SPDX-License-Identifier: Apache-2.0
#include "cpu/moments/moments.h"

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

void Check(const MomentsProblem& p, int threads) {
  const DType sums = p.type == DType::kF64 ? DType::kF64 : DType::kF32;
  const int64_t size = p.b * p.r * p.k * p.s * p.l, parts = p.b * p.k * p.l;
  Array x(p.type, size), ct(p.type, size), center(sums, parts);
  Array first(sums, parts), second(sums, parts);
  ct.Fill(&random);
  center.Fill(&random);
  // Deviations that are small beside the mean.
  const double shift = ItemSize(p.type) == 2 ? 30 : 1000;
  for (int64_t i = 0; i < size; ++i)
    x.Put(i, shift + random.Between(-9, 9) / 8.);
  const auto part = [&](int64_t i) {
    return (i / (p.l * p.s * p.k * p.r) * p.k + i / (p.l * p.s) % p.k) * p.l +
           i % p.l;
  };
  const auto describe = [&] {
    return Text("moments", Name(p.type), p.b, p.r, p.k, p.s, p.l, threads);
  };
  const double count = static_cast<double>(p.r * p.s);
  std::vector<double> mean(parts), variance(parts), sum(parts), product(parts);
  for (int64_t i = 0; i < size; ++i) mean[part(i)] += x[i] / count;
  for (int64_t i = 0; i < size; ++i) {
    const double deviation = x[i] - mean[part(i)];
    variance[part(i)] += deviation * deviation / count;
    sum[part(i)] += ct[i];
    product[part(i)] += ct[i] * (x[i] - center[part(i)]);
  }
  const double tolerance = sums == DType::kF64 ? 1e-12 : 1e-5;
  const auto compare = [&](bool ran, const std::vector<double>& a,
                           const std::vector<double>& b, double scale) {
    bool ok = ran && first.memory.Intact() && second.memory.Intact();
    for (int64_t i = 0; i < parts; ++i) {
      ok = ok && Close(first[i], a[i], tolerance) &&
           Close(second[i], b[i], tolerance * scale);
    }
    Expect(ok, describe);
  };
  compare(
      Moments(p, x.data(), first.data(), second.data(), Threads(threads)).ok(),
      mean, variance, 1);
  // Terms of either sign.
  compare(CenteredSums(p, ct.data(), x.data(), center.data(), first.data(),
                       second.data(), Threads(threads))
              .ok(),
          sum, product, shift * count);
}

}  // namespace

void CheckMoments() {
  for (DType type : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (int i = 0; i < 40; ++i) {
      const auto extent = [] {
        return random.Of<int64_t>({1, 1, 2, 3, 7, 16, 33});
      };
      MomentsProblem p{
          random.Between(1, 3), extent(), extent(), extent(), extent(), type};
      Check(p, static_cast<int>(random.Between(1, 3)));
    }
    Check({1, 3, 5, 3001, 1, type}, 2);
    Check({1, 1501, 1, 1, 67, type}, 3);
    Check({2, 17, 3, 19, 260, type}, 2);
  }
}

}  // namespace jax_layout
