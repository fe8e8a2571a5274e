// SPDX-License-Identifier: Apache-2.0
//
// What Python asks about the processor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "core/registry.h"
#include "cpu/isa.h"

namespace nb = nanobind;

namespace jax_layout {
namespace {

nb::dict Levels() {
  if (!UnknownMaxIsa().empty()) {
    std::string text = "JAX_LAYOUT_MAX_ISA must be one of ";
    for (const char* name : kIsaNames) text += std::string(name) + ", ";
    throw nb::value_error((text + "got " + UnknownMaxIsa() + ".").c_str());
  }
  nb::dict d;
  d["processor"] = Name(ProcessorIsa());
  d["max"] = Name(MaxIsa());
  d["level"] = Name(BestIsa());
  return d;
}

nb::dict Runs() {
  nb::dict kinds;
  for (const auto* k = KernelLevels::First(); k != nullptr; k = k->next()) {
    nb::dict kind;
    kind["level"] = k->best();
    kind["ran"] = k->ran();
    kinds[k->name()] = kind;
  }
  return kinds;
}

void Extend(void* module) {
  nb::module_ m = nb::borrow<nb::module_>(static_cast<PyObject*>(module));
  m.def("isa", &Levels,
        "A dict of instruction set levels: what the `processor` has, the `max` "
        "that JAX_LAYOUT_MAX_ISA allows, and the `level` that follows. Raises "
        "ValueError if the variable names none.");
  m.def("kernels", &Runs,
        "For each kind of kernels that come at several levels, a dict: the "
        "`level` of those that run here, and of those that `ran` last, \"\" "
        "for none.");
}

const ModuleExtension extension(Extend);

}  // namespace
}  // namespace jax_layout
