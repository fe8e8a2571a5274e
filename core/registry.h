// SPDX-License-Identifier: Apache-2.0
//
// How a handler makes itself known: the one macro at the end of core/*_ffi.cc.
// The same sources are compiled once per backend, so each extension module
// holds its own list.
#ifndef JAX_LAYOUT_CORE_REGISTRY_H_
#define JAX_LAYOUT_CORE_REGISTRY_H_

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_layout {

namespace ffi = ::xla::ffi;

// A state type gets its id from XLA when Python registers it.
template <typename State>
inline constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

struct Registration {
  const char* target;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
  ffi::TypeId* state_id;
  const ffi::TypeInfo* state_info;
  const Registration* next;

  static const Registration*& First() {
    static const Registration* first = nullptr;
    return first;
  }
};

inline ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(status.message);
}

// Registers the target "jax_layout_NAME". STATE is what INSTANTIATE returns, a
// type with a `static ffi::TypeId id`.
#define JAX_LAYOUT_REGISTER(NAME, INSTANTIATE, EXECUTE, STATE)      \
  [[maybe_unused]] static const bool NAME##_registered = [] {       \
    static const Registration registration = {                      \
        "jax_layout_" #NAME, INSTANTIATE, EXECUTE, &STATE::id,      \
        &kStateInfo<STATE>,  Registration::First()};                \
    Registration::First() = &registration;                          \
    return true;                                                    \
  }()

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_REGISTRY_H_
