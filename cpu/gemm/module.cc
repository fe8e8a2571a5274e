// SPDX-License-Identifier: Apache-2.0
//
// What Python asks about the CPU GEMM, and tells it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "core/registry.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/libraries.h"
#include "cpu/libraries.h"

namespace nb = nanobind;

namespace jax_layout {
namespace {

void Require(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
}

bool Supported(const std::string& operand_type,
               const std::string& result_type) {
  DType operands, result;
  Require(ParseDType(operand_type, &operands));
  Require(ParseDType(result_type, &result));
  return GemmSupported(operands, result);
}

void Extend(void* module) {
  nb::module_ m = nb::borrow<nb::module_>(static_cast<PyObject*>(module));
  m.def(
      "set_gemm_libraries",
      [](const std::string& onednn, const std::string& openblas) {
        LibraryPaths() = {onednn, openblas};
      },
      nb::arg("onednn"), nb::arg("openblas"),
      "Says where libdnnl and OpenBLAS are, \"\" where they are not. Loads "
      "neither.");
  m.def("gemm_supported", &Supported, nb::arg("operand_type"),
        nb::arg("result_type"),
        "Whether there is a kernel for these dtypes on this machine.");
  m.def("gemm_method_names", &GemmMethodNames,
        "The kernels and libraries that there are for products.");
  m.def(
      "library_targets",
      [] {
        nb::dict targets;
        targets["oneDNN"] = OnednnTarget();
        targets["OpenBLAS"] = OpenblasTarget();
        return targets;
      },
      "What each library calls the instruction set or processor that its "
      "kernels are for, \"\" where it is not. Loads them.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
