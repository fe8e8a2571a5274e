// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CORE_FLOAT_TYPES_H_
#define JAX_LAYOUT_CORE_FLOAT_TYPES_H_

#include "core/dtype.h"
#include "core/registry.h"

namespace jax_layout {

// Floating types, and those in which they are summed.
struct FloatType {
  ffi::DataType ffi_type, sum;
  DType type;
};
inline constexpr FloatType kFloatTypes[] = {{ffi::F32, ffi::F32, DType::kF32},
                                            {ffi::F64, ffi::F64, DType::kF64},
                                            {ffi::BF16, ffi::F32, DType::kBF16},
                                            {ffi::F16, ffi::F32, DType::kF16}};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_FLOAT_TYPES_H_
