// SPDX-License-Identifier: Apache-2.0
#include "cpu/geam/geam.h"

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

void Check(const GeamProblem& p) {
  const bool complex = p.type == DType::kC64 || p.type == DType::kC128;
  const DType part = p.type == DType::kC64    ? DType::kF32
                     : p.type == DType::kC128 ? DType::kF64
                                              : p.type;
  const int64_t parts = complex ? 2 : 1, matrix = p.m * p.n;
  const int64_t size = p.batch * matrix * parts;
  Array a(part, size), b(part, size), y(part, size);
  a.Fill(&random);
  b.Fill(&random);
  bool ok = Geam(p, a.data(), b.data(), y.data(), Threads(2)).ok() &&
            y.memory.Intact();
  for (int64_t i = 0; i < p.batch * matrix; ++i) {
    const int64_t row = i % matrix / p.n, col = i % p.n;
    const auto at = [&](const Array& array, bool transposed) {
      const int64_t k = i / matrix * matrix +
                        (transposed ? col * p.m + row : row * p.n + col);
      return std::complex<double>(array[k * parts],
                                  complex ? array[k * parts + 1] : 0);
    };
    const std::complex<double> want =
        p.alpha * at(a, p.transpose_a) + p.beta * at(b, p.transpose_b);
    ok = ok && y[i * parts] == Rounded(part, want.real()) &&
         (!complex || y[i * parts + 1] == Rounded(part, want.imag()));
  }
  Expect(ok, [&] {
    return Text("geam", Name(p.type), p.batch, p.m, p.n, p.transpose_a,
                p.transpose_b);
  });
}

}  // namespace

void CheckGeam() {
  for (DType type :
       {DType::kF32, DType::kF64, DType::kBF16, DType::kC64, DType::kC128}) {
    const bool complex = type == DType::kC64 || type == DType::kC128;
    for (bool a : {false, true}) {
      for (bool b : {false, true}) {
        for (int64_t m : {1, 3, 16, 33, 67, 130}) {
          for (int64_t n : {1, 2, 15, 64, 97}) {
            Check({random.Between(1, 2),
                   m,
                   n,
                   type,
                   a,
                   b,
                   {2, complex ? 1. : 0.},
                   {-1, complex ? 3. : 0.}});
          }
        }
      }
    }
  }
}

}  // namespace jax_layout
