// SPDX-License-Identifier: Apache-2.0
//
// A product as a contraction of small integers, and a method of cpu/gemm held
// to plain loops over it.
#ifndef JAX_LAYOUT_TESTS_ARM_PRODUCT_H_
#define JAX_LAYOUT_TESTS_ARM_PRODUCT_H_

#include <map>
#include <string>
#include <vector>

#include "core/gemm/problem.h"
#include "core/status.h"
#include "cpu/executor.h"
#include "cpu/isa.h"
#include "tests/arm/activations.h"
#include "tests/arm/check.h"

namespace jax_layout {

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
                            derivative, bias, aux, false, false, 0, ""},
                           problem)
        .ok();
  }
  std::string Describe() const {
    std::string text = Text(Spec(), Name(type), Name(result));
    for (const auto& [axis, size] : sizes) text += Text(axis, size);
    return text + Text("alpha", alpha, "beta", beta, activation, derivative,
                       "bias", bias, "aux", aux);
  }
};

// One of the methods of cpu/gemm, which serves what a check asks for.
struct ProductMethod {
  bool (*supports)(const GemmProblem&);
  Status (*run)(const GemmProblem&, const GemmBuffers&, const Executor&, Isa);
};

inline void CheckProduct(const ProductMethod& method, const Product& c,
                         Random* random) {
  GemmProblem problem;
  const bool planned = c.Problem(&problem);
  const bool served = planned && method.supports(problem);
  Expect(served == (BestIsa() != Isa::kPortable),
         [&] { return "serves " + c.Describe(); });
  if (!served) return;
  Array a(c.type, c.Size(c.a)), b(c.type, c.Size(c.b));
  Array y(c.result, c.Size(c.y)), aux(c.result, y.size);
  Array bias(c.result, problem.plan.n);
  for (Array* array : {&a, &b, &y, &aux, &bias}) array->Fill(random, 2);
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
  bool ok = method.run(problem, buffers, Threads(2), BestIsa()).ok();
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

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_ARM_PRODUCT_H_
