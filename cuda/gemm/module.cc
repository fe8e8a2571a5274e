// SPDX-License-Identifier: Apache-2.0
//
// What Python tells the CUDA GEMM.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "core/registry.h"
#include "cuda/gemm/tuning.h"

namespace nb = nanobind;

namespace jax_layout {
namespace {

void Extend(void* module) {
  nb::module_ m = nb::borrow<nb::module_>(static_cast<PyObject*>(module));
  m.def(
      "tune_gemms",
      [](const std::string& path, int candidates) {
        const Status status = TuneGemms(path, candidates);
        if (!status.ok()) throw nb::value_error(status.message.c_str());
      },
      nb::arg("path"), nb::arg("candidates"),
      "TuneGemms: path \"\" for choices that last as long as the process.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
