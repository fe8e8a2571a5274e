// SPDX-License-Identifier: Apache-2.0
//
// The extension module of one backend; JAX_LAYOUT_MODULE is _cpu or _cuda.
#include <nanobind/nanobind.h>

#include "core/registry.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  for (auto* r = jax_layout::Registration::First(); r; r = r->next) {
    nb::dict handlers;
    if (r->instantiate) handlers["instantiate"] = Capsule(r->instantiate);
    handlers["execute"] = Capsule(r->execute);
    targets[r->target] = handlers;
  }
  return targets;
}

}  // namespace

NB_MODULE(JAX_LAYOUT_MODULE, m) {
  m.doc() = "FFI handlers of one jax_layout backend.";
  m.attr("ffi_api_version") =
      nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  for (auto* e = jax_layout::ModuleExtension::First(); e; e = e->next) {
    e->extend(m.ptr());
  }
  m.def("registrations", &Registrations,
        "Maps each FFI target to its handlers, as jax.ffi.register_ffi_target "
        "takes them.");
}
