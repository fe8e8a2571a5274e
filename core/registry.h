// SPDX-License-Identifier: Apache-2.0
//
// How a handler makes itself known: the one macro at the end of core/*/ffi.cc.
// The same sources are compiled once per backend, so each extension module
// holds its own list.
#ifndef JAX_LAYOUT_CORE_REGISTRY_H_
#define JAX_LAYOUT_CORE_REGISTRY_H_

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_layout {

namespace ffi = ::xla::ffi;

struct Registration {
  const char* target;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
  const Registration* next;

  static const Registration*& First() {
    static const Registration* first = nullptr;
    return first;
  }
};

// What a backend adds to its module, given as a PyObject*. A static one makes
// itself known.
struct ModuleExtension {
  void (*extend)(void* module);
  const ModuleExtension* next;

  explicit ModuleExtension(void (*extend)(void*))
      : extend(extend), next(First()) {
    First() = this;
  }
  static const ModuleExtension*& First() {
    static const ModuleExtension* first = nullptr;
    return first;
  }
};

// An instantiate handler that makes its state type known to XLA on its first
// call, which is XLA's own at registration. (Registered from Python, before the
// backend starts, jaxlib sees the handler before the type and refuses it.)
template <typename State, XLA_FFI_Handler* handler>
XLA_FFI_Error* WithState(XLA_FFI_CallFrame* frame) {
  static constexpr ffi::TypeInfo info = ffi::MakeTypeInfo<State>();
  if (State::id == XLA_FFI_UNKNOWN_TYPE_ID) {
    XLA_FFI_Error* error =
        ffi::Ffi::RegisterTypeId(frame->api, State::kName, &State::id, &info);
    if (error != nullptr) return error;
  }
  return handler(frame);
}

inline ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(status.message);
}

// Registers the target "jax_layout_NAME". STATE is what INSTANTIATE returns: a
// type with `static ffi::TypeId id` and a `kName` of its own.
#define JAX_LAYOUT_REGISTER(NAME, INSTANTIATE, EXECUTE, STATE)                 \
  [[maybe_unused]] static const bool NAME##_registered = [] {                  \
    static const Registration registration = {"jax_layout_" #NAME,             \
                                              WithState<STATE, INSTANTIATE>,   \
                                              EXECUTE, Registration::First()}; \
    Registration::First() = &registration;                                     \
    return true;                                                               \
  }()

// The same without a plan to keep from call to call.
#define JAX_LAYOUT_REGISTER_STATELESS(NAME, EXECUTE)                           \
  [[maybe_unused]] static const bool NAME##_registered = [] {                  \
    static const Registration registration = {"jax_layout_" #NAME, nullptr,    \
                                              EXECUTE, Registration::First()}; \
    Registration::First() = &registration;                                     \
    return true;                                                               \
  }()

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_REGISTRY_H_
