// SPDX-License-Identifier: Apache-2.0
//
// What Python asks about GEMMs before it calls one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "core/registry.h"
#include "gemm/gemm.h"  // the backend's

namespace nb = nanobind;

namespace jax_layout {
namespace {

nb::object Checked(const Status& status, nb::object value) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return value;
}

nb::object Order(const std::string& spec, const std::vector<int64_t>& a,
                 const std::vector<int64_t>& b, int64_t operand_itemsize,
                 int64_t result_itemsize) {
  GemmSpec order;
  int64_t moved = 0;
  const Status status = ChooseGemmOrder(spec, a, b, operand_itemsize,
                                        result_itemsize, &order, &moved);
  return Checked(status, nb::make_tuple(order.a, order.b, order.y, moved));
}

nb::dict Matrix(const GemmMatrix& matrix) {
  nb::dict d;
  d["transposed"] = matrix.transposed;
  d["ld"] = matrix.ld;
  return d;
}

nb::object Plan(const std::string& spec, const std::vector<int64_t>& a,
                const std::vector<int64_t>& b) {
  GemmPlan plan;
  bool in_place = false;
  const Status status = MakeGemmPlan(spec, a, b, &plan, &in_place);
  if (status.ok() && !in_place) return nb::none();
  nb::dict d;
  d["m"] = plan.m;
  d["n"] = plan.n;
  d["k"] = plan.k;
  d["a"] = Matrix(plan.a);
  d["b"] = Matrix(plan.b);
  d["y"] = Matrix(plan.y);
  nb::list loops;
  for (const GemmLoop& loop : plan.loops) {
    loops.append(nb::make_tuple(loop.extent, loop.a_stride, loop.b_stride,
                                loop.y_stride));
  }
  d["loops"] = loops;
  d["swapped"] = plan.swapped;
  return Checked(status, d);
}

std::string Obstacle(const GemmProblem& problem) {
  return GemmMethods(problem).empty() ? "" : GemmObstacle(problem);
}

// A question about the problem that the attributes of the FFI target name.
template <typename Answer>
void Ask(nb::module_& m, const char* name, Answer (*ask)(const GemmProblem&),
         const char* doc) {
  m.def(
      name,
      [ask](const std::string& spec, const std::vector<int64_t>& a,
            const std::vector<int64_t>& b, const std::string& operand_type,
            const std::string& result_type, const std::vector<double>& alpha,
            const std::vector<double>& beta, const std::string& activation,
            const std::string& derivative, bool bias, bool aux, bool sums,
            bool tf32, int64_t scales, const std::string& method) {
        GemmProblem problem;
        const Status status = MakeGemmProblem(
            {spec, a, b, operand_type, result_type, alpha, beta, activation,
             derivative, bias, aux, sums, tf32, scales, method},
            &problem);
        return status.ok() ? ask(problem) : Answer();
      },
      nb::arg("spec"), nb::arg("a_shape"), nb::arg("b_shape"),
      nb::arg("operand_type"), nb::arg("result_type"), nb::arg("alpha"),
      nb::arg("beta"), nb::arg("activation"), nb::arg("derivative"),
      nb::arg("bias"), nb::arg("aux"), nb::arg("sums"), nb::arg("tf32"),
      nb::arg("scales"), nb::arg("method") = "", doc);
}

void Extend(void* module) {
  nb::module_ m = nb::borrow<nb::module_>(static_cast<PyObject*>(module));
  m.def("gemm_order", &Order,
        "ChooseGemmOrder: (a, b, y, bytes moved) for a contraction and the "
        "shapes and item sizes of its operands.");
  m.def("gemm_plan", &Plan,
        "MakeGemmPlan: a dict, or None if the contraction does not run in "
        "place.");
  Ask(m, "gemm_methods", &GemmMethods,
      "Which of this backend's methods compute it: the one that runs it "
      "first.");
  Ask(m, "gemm_obstacle", &Obstacle,
      "Why this machine does not compute what they would, or an empty string.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
