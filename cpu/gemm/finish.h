// SPDX-License-Identifier: Apache-2.0
//
// What a library leaves to do with a block of y, while it is in cache.
#ifndef JAX_LAYOUT_CPU_GEMM_FINISH_H_
#define JAX_LAYOUT_CPU_GEMM_FINISH_H_

#include <complex>
#include <cstdint>

#include "core/gemm/problem.h"

namespace jax_layout {

// A block of y; pointers are to its first element.
struct GemmBlock {
  int64_t rows, cols;
  // a @ b, or null where that is zero; f32 for y of 16 bits, else of y's dtype.
  // May be y.
  const void* product;
  int64_t product_ld;
  const void* bias;
  void* y;
  void* aux;
  int64_t ld;  // of y and aux
};

// y = activation(z) or z * derivative'(aux), z = alpha * product + beta * y +
// bias; alpha and beta are the caller's: 1 and 0 where the library had them.
// 16-bit types are computed in f32 and rounded once.
void FinishGemm(const GemmProblem& problem, std::complex<double> alpha,
                std::complex<double> beta, const GemmBlock& block);

// The sums of rows [row, row + rows) of a, accumulated as products are.
void SumGemmRows(const GemmProblem& problem, const void* a, int64_t row,
                 int64_t rows, void* sums);

// Rows of bf16 or f16, ld apart, to dense rows of f32.
void WidenToF32(DType type, const void* x, int64_t ld, int64_t rows,
                int64_t cols, float* y);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_FINISH_H_
