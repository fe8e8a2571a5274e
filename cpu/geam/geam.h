// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_GEAM_GEAM_H_
#define JAX_LAYOUT_CPU_GEAM_GEAM_H_

#include <complex>
#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// y = alpha * op(a) + beta * op(b) for each of `batch` dense row-major
// matrices; y is (m, n), and so is an operand that is not transposed.
struct GeamProblem {
  int64_t batch = 1, m = 0, n = 0;
  DType type = DType::kF32;
  bool transpose_a = false, transpose_b = false;
  std::complex<double> alpha = 1, beta = 1;
};

// Whether there is a kernel for a type.
bool GeamSupported(DType type);

Status Geam(const GeamProblem& problem, const void* a, const void* b, void* y,
            const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEAM_GEAM_H_
