// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/matvec/matvec.h"

#include <map>

#include "cpu/isa.h"
#include "tests/arm/activations.h"
#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

struct Product {
  std::string a, b, y;  // axes
  std::map<char, int64_t> sizes;
  DType type = DType::kF32, result = DType::kF32;
  double alpha = 1, beta = 0;
  std::string activation = "none", derivative = "none";
  bool bias = false, aux = false;

  std::string Spec() const { return a + "," + b + "->" + y; }
  std::vector<int64_t> Shape(const std::string& axes) const {
    std::vector<int64_t> shape;
    for (char axis : axes) shape.push_back(sizes.at(axis));
    return shape;
  }
  int64_t Size(const std::string& axes) const {
    int64_t size = 1;
    for (int64_t n : Shape(axes)) size *= n;
    return size;
  }
  // Of the element that the axes' indices name, in a row-major array.
  int64_t At(const std::string& axes, const std::map<char, int64_t>& at) const {
    int64_t offset = 0;
    for (char axis : axes) offset = offset * sizes.at(axis) + at.at(axis);
    return offset;
  }

  bool Problem(GemmProblem* problem) const {
    const std::vector<int64_t> shapes[] = {Shape(a), Shape(b)};
    const std::vector<double> scalars[] = {{alpha, 0}, {beta, 0}};
    const std::string spec = Spec();
    return MakeGemmProblem({spec, shapes[0], shapes[1], Name(type),
                            Name(result), scalars[0], scalars[1], activation,
                            derivative, bias, aux, false, false, 0},
                           problem)
        .ok();
  }
  std::string Describe() const {
    std::string text = Text("matvec", Spec(), Name(type), Name(result));
    for (const auto& [axis, size] : sizes) text += Text(axis, size);
    return text + Text("alpha", alpha, "beta", beta, activation, derivative,
                       "bias", bias, "aux", aux);
  }
};

void Check(const Product& c) {
  GemmProblem problem;
  const bool planned = c.Problem(&problem);
  const bool served = planned && MatvecSupports(problem);
  Expect(served == (BestIsa() != Isa::kPortable),
         [&] { return "serves " + c.Describe(); });
  if (!served) return;
  Array a(c.type, c.Size(c.a)), b(c.type, c.Size(c.b));
  Array y(c.result, c.Size(c.y)), aux(c.result, y.size);
  Array bias(c.result, problem.plan.n);
  for (Array* array : {&a, &b, &y, &aux, &bias}) array->Fill(&random, 2);
  std::vector<double> want(y.size);
  std::map<char, int64_t> at;
  for (const auto& [axis, size] : c.sizes) at[axis] = 0;
  for (bool done = false; !done;) {
    want[c.At(c.y, at)] += a[c.At(c.a, at)] * b[c.At(c.b, at)];
    done = true;
    for (auto& [axis, i] : at) {
      if (++i < c.sizes.at(axis)) {
        done = false;
        break;
      }
      i = 0;
    }
  }
  std::vector<double> want_aux(y.size);
  const bool derives = c.derivative != "none";
  for (int64_t i = 0; i < y.size; ++i) {
    double z = c.alpha * want[i] + c.beta * y[i];
    if (c.bias) z += bias[i % bias.size];
    want_aux[i] = c.aux ? z : aux[i];
    want[i] =
        Activated(problem.activation, z) * Slope(problem.derivative, aux[i]);
  }
  GemmBuffers buffers;
  buffers.a = problem.plan.swapped ? b.data() : a.data();
  buffers.b = problem.plan.swapped ? a.data() : b.data();
  buffers.y = y.data();
  buffers.bias = bias.data();
  buffers.aux = c.aux || derives ? aux.data() : nullptr;
  bool ok = GemmMatvec(problem, buffers, Threads(2), BestIsa()).ok();
  for (const Array* array : {&a, &b, &y, &aux, &bias}) {
    ok = ok && array->memory.Intact();
  }
  const bool exact = c.activation != "gelu" && c.derivative != "gelu";
  const double tolerance = exact ? 0 : 2 * Epsilon(c.result);
  for (int64_t i = 0; i < y.size; ++i) {
    ok = ok && Close(y[i], Rounded(c.result, want[i]), tolerance) &&
         Close(aux[i], Rounded(c.result, want_aux[i]), 0);
  }
  Expect(ok, [&] { return c.Describe(); });
}

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
            Check(c);
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
