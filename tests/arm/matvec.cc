// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/matvec/matvec.h"

#include "cpu/isa.h"
#include "tests/arm/check.h"
#include "tests/arm/product.h"

namespace jax_layout {
namespace {

Random random;

constexpr ProductMethod kMatvec = {MatvecSupports, GemmMatvec};

// Every number of 16 bits, and sums of two, which are rounded.
void CheckRounding(DType type) {
  constexpr int64_t kAll = 1 << 16;
  Product c{"k", "kn", "n", {{'k', 2}, {'n', kAll}}};
  c.type = c.result = type;
  GemmProblem problem;
  if (!c.Problem(&problem) || !MatvecSupports(problem)) return;
  Array a(type, 2), b(type, 2 * kAll), y(type, kAll);
  auto* bits = static_cast<uint16_t*>(b.data());
  for (double second : {0., 1., 0.00390625}) {
    a.Put(0, 1);
    a.Put(1, second);
    for (int64_t i = 0; i < kAll; ++i) {
      bits[i] = static_cast<uint16_t>(i);
      b.Put(kAll + i, second == 0 ? 0 : random.Between(-1000, 1000) / 8.);
    }
    GemmBuffers buffers;
    buffers.a = a.data();
    buffers.b = b.data();
    buffers.y = y.data();
    if (problem.plan.swapped) std::swap(buffers.a, buffers.b);
    const bool ok = GemmMatvec(problem, buffers, Threads(1), BestIsa()).ok();
    Expect(ok, [&] { return Text("rounds", Name(type)); });
    for (int64_t i = 0; i < kAll; ++i) {
      const float sum =
          std::fma(static_cast<float>(second), static_cast<float>(b[kAll + i]),
                   static_cast<float>(b[i]));
      Expect(Close(y[i], Rounded(type, sum), 0),
             [&] { return Text("rounds", Name(type), i, second, y[i], sum); });
    }
  }
}

}  // namespace

void CheckMatvec() {
  const Product all[] = {{"k", "kn", "n", {}},    {"k", "nk", "n", {}},
                         {"mk", "k", "m", {}},    {"km", "k", "m", {}},
                         {"bk", "bkn", "bn", {}}, {"bmk", "bk", "bm", {}}};
  for (Product c : all) {
    for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (DType result : {type, DType::kF32}) {
        c.type = type;
        c.result = result;
        for (int64_t k : {1, 2, 3, 4, 7, 16, 31, 97}) {
          for (int64_t n : {2, 3, 5, 8, 13, 33, 131, 1100}) {
            c.sizes.clear();
            for (char axis : c.a + c.b) {
              c.sizes[axis] = axis == 'k' ? k : axis == 'b' ? 3 : n;
            }
            c.alpha = random.Of({1., 2., 0.});
            c.beta = random.Of({0., -1.});
            // With a batch, rows may lie too far apart for a bias.
            c.bias = c.y == "n" && random.Flip();
            c.activation = random.Of({"none", "relu", "gelu"});
            c.derivative = c.activation == "none"
                               ? random.Of({"none", "relu", "gelu"})
                               : "none";
            c.aux = c.derivative == "none" && random.Flip();
            CheckProduct(kMatvec, c, &random);
          }
        }
      }
    }
  }
  CheckRounding(DType::kBF16);
  CheckRounding(DType::kF16);
#ifdef __aarch64__
  if (BestIsa() == Isa::kNeon) CheckVectors();
#endif
}

}  // namespace jax_layout
