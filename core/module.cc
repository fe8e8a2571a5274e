// SPDX-License-Identifier: Apache-2.0
//
// The extension module of one backend; JAX_LAYOUT_MODULE is _cpu or _cuda.
#include <nanobind/nanobind.h>

#include "core/registry.h"

namespace nb = nanobind;

namespace {

template <typename T>
nb::capsule Capsule(T* pointer) {
  return nb::capsule(const_cast<void*>(
      reinterpret_cast<const void*>(pointer)));
}

nb::dict Registrations() {
  nb::dict targets;
  for (auto* r = jax_layout::Registration::First(); r; r = r->next) {
    nb::dict handlers, state;
    handlers["instantiate"] = Capsule(r->instantiate);
    handlers["execute"] = Capsule(r->execute);
    state["type_id"] = Capsule(r->state_id);
    state["type_info"] = Capsule(r->state_info);
    targets[r->target] = nb::make_tuple(handlers, state);
  }
  return targets;
}

}  // namespace

NB_MODULE(JAX_LAYOUT_MODULE, m) {
  m.doc() = "FFI handlers of one jax_layout backend.";
  m.attr("ffi_api_version") =
      nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", &Registrations,
        "Maps each FFI target to its handlers and its state type, as "
        "jax.ffi.register_ffi_target and register_ffi_type take them.");
}
