// SPDX-License-Identifier: Apache-2.0
//
// What cuBLASLt calls the dtypes.
#ifndef JAX_LAYOUT_CUDA_GEMM_TYPES_H_
#define JAX_LAYOUT_CUDA_GEMM_TYPES_H_

#include <cstdint>

#include "core/dtype.h"
#include "cuda/gemm/cublaslt.h"

namespace jax_layout {

struct TypeInfo {
  const char* name;
  lt::DataType type;
  int64_t bytes;
};
constexpr TypeInfo kTypes[] = {
    // by DType
    {"float32", lt::kR32F, 4},
    {"float64", lt::kR64F, 8},
    {"bfloat16", lt::kR16BF, 2},
    {"float16", lt::kR16F, 2},
    {"float8_e4m3fn", lt::kR8FE4M3, 1},
    {"float8_e5m2", lt::kR8FE5M2, 1},
    {"int8", lt::kR8I, 1},
    {"int32", lt::kR32I, 4},
    {"complex64", lt::kC32F, 8},
    {"complex128", lt::kC64F, 16},
};
inline const TypeInfo& Info(DType type) {
  return kTypes[static_cast<int>(type)];
}

inline bool IsComplex(DType type) {
  return type == DType::kC64 || type == DType::kC128;
}

inline bool IsFp8(DType type) {
  return type == DType::kF8E4M3 || type == DType::kF8E5M2;
}

// Whether cuBLASLt makes such results of such operands.
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_GEMM_TYPES_H_
