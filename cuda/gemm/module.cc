// SPDX-License-Identifier: Apache-2.0
//
// What Python tells the CUDA GEMM, and asks of the machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "core/registry.h"
#include "cuda/device.h"
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
  m.def("why_unusable", &WhyUnusable,
        "Why kernels cannot run on the devices here, or an empty string.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
