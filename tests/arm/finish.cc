// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/finish.h"

#include <complex>

#include "tests/arm/activations.h"
#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu,
                                       Activation::kGelu, Activation::kGeluErf};

void CheckBlock(DType type, Activation activation, Activation derivative) {
  const int64_t rows = random.Between(1, 5), cols = random.Between(1, 300);
  const int64_t ld = cols + random.Between(0, 3);
  const bool halves = ItemSize(type) == 2;
  Array product(halves ? DType::kF32 : type, rows * cols);
  Array bias(type, cols), y(type, (rows - 1) * ld + cols), aux(type, y.size);
  for (Array* array : {&product, &bias, &y, &aux}) array->Fill(&random);
  GemmProblem problem;
  problem.result = type;
  problem.bias = random.Flip();
  problem.activation = activation;
  problem.derivative = derivative;
  const bool derives = derivative != Activation::kNone;
  problem.aux = !derives && random.Flip();
  const double alpha = random.Of({1., 2.}), beta = random.Of({0., -1.});
  std::vector<double> want(y.size), want_aux(y.size);
  for (int64_t i = 0; i < y.size; ++i) {
    want[i] = y[i];
    want_aux[i] = aux[i];
    if (i % ld >= cols) continue;
    double z = alpha * product[i / ld * cols + i % ld] + beta * y[i];
    if (problem.bias) z += bias[i % ld];
    if (problem.aux) want_aux[i] = z;
    want[i] = Activated(activation, z) * Slope(derivative, aux[i]);
  }
  FinishGemm(problem, alpha, beta,
             {rows, cols, product.data(), cols, bias.data(), y.data(),
              problem.aux || derives ? aux.data() : nullptr, ld});
  bool ok = y.memory.Intact() && aux.memory.Intact();
  const bool gelu = activation == Activation::kGelu ||
                    activation == Activation::kGeluErf ||
                    derivative == Activation::kGelu;
  const double tolerance = gelu ? 2 * Epsilon(type) : 0;
  for (int64_t i = 0; i < y.size; ++i) {
    ok = ok && Close(y[i], Rounded(type, want[i]), tolerance) &&
         Close(aux[i], Rounded(type, want_aux[i]), 0);
  }
  Expect(ok, [&] {
    return Text("finish", Name(type), rows, cols, ld, "alpha", alpha, "beta",
                beta, "bias", problem.bias, "activation",
                static_cast<int>(activation), static_cast<int>(derivative));
  });
}

template <class R>
void CheckComplexBlock(DType type) {
  using C = std::complex<R>;
  constexpr int64_t kSize = 301;
  const Memory product(kSize * sizeof(C)), y(kSize * sizeof(C));
  auto* const from = reinterpret_cast<C*>(product.data());
  auto* const to = reinterpret_cast<C*>(y.data());
  std::vector<C> want(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    from[i] = C(random.Between(-3, 3), random.Between(-3, 3));
    to[i] = C(random.Between(-3, 3), random.Between(-3, 3));
    want[i] = C(1, 2) * from[i] + C(-1, 3) * to[i];
  }
  GemmProblem problem;
  problem.result = type;
  FinishGemm(problem, {1, 2}, {-1, 3},
             {1, kSize, from, kSize, nullptr, to, nullptr, kSize});
  bool ok = y.Intact();
  for (int64_t i = 0; i < kSize; ++i) ok = ok && to[i] == want[i];
  Expect(ok, [&] { return Text("finish", Name(type)); });
}

void CheckSums(DType type, DType result, bool transposed) {
  const int64_t m = random.Between(1, 300), k = random.Between(1, 70);
  GemmProblem problem;
  problem.operands = type;
  problem.result = result;
  problem.plan.m = m;
  problem.plan.k = k;
  problem.plan.a = {transposed, transposed ? m : k};
  Array a(type, m * k), sums(result, m);
  a.Fill(&random);
  sums.Fill(&random);
  SumGemmRows(problem, a.data(), 0, m, sums.data());
  bool ok = sums.memory.Intact();
  for (int64_t i = 0; i < m; ++i) {
    double want = 0;
    for (int64_t j = 0; j < k; ++j)
      want += a[transposed ? j * m + i : i * k + j];
    ok = ok && sums[i] == Rounded(result, want);
  }
  Expect(ok, [&] {
    return Text("sums", Name(type), Name(result), m, k, transposed);
  });
}

// Every number of 16 bits, in rows of odd length.
void CheckWiden(DType type) {
  constexpr int64_t kRows = 257, kCols = 255, kStep = 256;
  const Memory x(kRows * kStep * 2), y(kRows * kCols * 4);
  auto* const bits = reinterpret_cast<uint16_t*>(x.data());
  for (int64_t i = 0; i < kRows * kStep; ++i) {
    bits[i] = static_cast<uint16_t>(i);
  }
  WidenToF32(type, bits, kStep, kRows, kCols,
             reinterpret_cast<float*>(y.data()));
  Expect(y.Intact(), [] { return Text("widen"); });
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    const double want = Get(type, bits, i / kCols * kStep + i % kCols);
    const double got = Get(DType::kF32, y.data(), i);
    Expect(Close(got, want, 0) && std::signbit(got) == std::signbit(want),
           [&] { return Text("widen", Name(type), want, "to", got); });
  }
}

}  // namespace

void CheckFinish() {
  for (DType type :
       {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kS32}) {
    for (int i = 0; i < 30; ++i) {
      for (Activation activation : kActivations) {
        if (type == DType::kS32 && activation != Activation::kNone) continue;
        CheckBlock(type, activation, Activation::kNone);
        if (activation == Activation::kGeluErf) continue;
        CheckBlock(type, Activation::kNone, activation);
      }
    }
  }
  CheckComplexBlock<float>(DType::kC64);
  CheckComplexBlock<double>(DType::kC128);
  for (bool transposed : {false, true}) {
    for (int i = 0; i < 30; ++i) {
      CheckSums(DType::kF32, DType::kF32, transposed);
      CheckSums(DType::kF64, DType::kF64, transposed);
      CheckSums(DType::kBF16, DType::kBF16, transposed);
      CheckSums(DType::kBF16, DType::kF32, transposed);
      CheckSums(DType::kF16, DType::kF16, transposed);
      CheckSums(DType::kF16, DType::kF32, transposed);
      CheckSums(DType::kS8, DType::kS32, transposed);
    }
  }
  CheckWiden(DType::kBF16);
  CheckWiden(DType::kF16);
}

}  // namespace jax_layout
