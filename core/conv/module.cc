// SPDX-License-Identifier: Apache-2.0
//
// What Python asks about a convolution before it calls one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "conv/conv.h"  // the backend's
#include "core/conv/plan.h"
#include "core/registry.h"

namespace nb = nanobind;

namespace jax_layout {
namespace {

using Axes = std::vector<int64_t>;

nb::dict Plan(const std::string& pass, const std::string& type,
              const std::string& result, const Axes& x_shape,
              const Axes& w_shape, const Axes& y_shape, const Axes& x_order,
              const Axes& w_order, const Axes& y_order, int64_t x_block,
              int64_t y_block, const Axes& stride, const Axes& dilation,
              const Axes& pad_low, const Axes& pad_high, int64_t groups,
              bool bias, bool relu, const std::string& w_format, bool winograd,
              const std::string& method) {
  ConvProblem problem;
  Status status = MakeConvProblem(
      {pass,     type,    result,  x_shape, w_shape,  y_shape,  x_order,
       w_order,  y_order, x_block, y_block, stride,   dilation, pad_low,
       pad_high, groups,  bias,    relu,    w_format, winograd},
      &problem);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  ConvKernel kernel;
  const bool supported = ChooseConvKernel(problem, method, &kernel).ok();
  nb::dict plan;
  plan["supported"] = supported;
  plan["methods"] =
      supported ? ConvMethods(problem) : std::vector<std::string>();
  plan["workspace"] = kernel.workspace > kOwnWorkspace ? kernel.workspace : 0;
  plan["w_format"] = kernel.w_format;
  plan["implementation"] = kernel.implementation;
  return plan;
}

void Extend(void* module) {
  nb::module_ m = nb::borrow<nb::module_>(static_cast<PyObject*>(module));
  m.def("conv_plan", &Plan, nb::arg("pass_"), nb::arg("type"),
        nb::arg("result"), nb::arg("x_shape"), nb::arg("w_shape"),
        nb::arg("y_shape"), nb::arg("x_order"), nb::arg("w_order"),
        nb::arg("y_order"), nb::arg("x_block"), nb::arg("y_block"),
        nb::arg("stride"), nb::arg("dilation"), nb::arg("pad_low"),
        nb::arg("pad_high"), nb::arg("groups"), nb::arg("bias"),
        nb::arg("relu"), nb::arg("w_format"), nb::arg("winograd"),
        nb::arg("method") = "",
        "What becomes of the convolution that the attributes of the FFI target "
        "name, a dict: whether it is `supported` by this backend, the bytes of "
        "`workspace` the program is to give it, which `implementation` runs "
        "it, the `methods` "
        "that "
        "can, the best guess first, and `w_format`, the order in which the "
        "implementation reads the weights without moving them, \"\" if it has "
        "none of its own.");
  m.def("conv_method_names", &ConvMethodNames,
        "The names of all ways to compute a convolution, on this machine or "
        "not.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
