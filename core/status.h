// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CORE_STATUS_H_
#define JAX_LAYOUT_CORE_STATUS_H_

#include <string>
#include <utility>

namespace jax_layout {

// What a plan or a kernel reports: nothing, or why it could not go on. No
// framework header enters the kernels; the FFI handler turns this into an
// ffi::Error.
struct [[nodiscard]] Status {
  std::string message;

  bool ok() const { return message.empty(); }
  static Status Ok() { return {}; }
  static Status Error(std::string message) { return {std::move(message)}; }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_STATUS_H_
