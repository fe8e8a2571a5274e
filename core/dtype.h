// SPDX-License-Identifier: Apache-2.0
//
// The dtypes that kernels compute in.
#ifndef JAX_LAYOUT_CORE_DTYPE_H_
#define JAX_LAYOUT_CORE_DTYPE_H_

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "core/status.h"

namespace jax_layout {

enum class DType {
  kF32,
  kF64,
  kBF16,
  kF16,
  kF8E4M3,
  kF8E5M2,
  kS8,
  kS32,
  kC64,
  kC128,
};

// As in NumPy, in the order of DType.
constexpr std::string_view kDTypeNames[] = {
    "float32",     "float64", "bfloat16", "float16",   "float8_e4m3fn",
    "float8_e5m2", "int8",    "int32",    "complex64", "complex128"};

inline int64_t ItemSize(DType type) {
  switch (type) {
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kS8:
      return 1;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
    default:
      return 4;
  }
}

inline Status ParseDType(std::string_view name, DType* type) {
  for (size_t i = 0; i < std::size(kDTypeNames); ++i) {
    if (kDTypeNames[i] == name) {
      *type = static_cast<DType>(i);
      return Status::Ok();
    }
  }
  return Status::Error("unknown dtype " + std::string(name) + ".");
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_DTYPE_H_
