// SPDX-License-Identifier: Apache-2.0
//
// What a backend's GEMM is asked to do, and the memory it does it with.
#ifndef JAX_LAYOUT_CORE_GEMM_PROBLEM_H_
#define JAX_LAYOUT_CORE_GEMM_PROBLEM_H_

#include <complex>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/gemm/plan.h"
#include "core/status.h"

namespace jax_layout {

// For every step of the plan's loops,
//
//   z = alpha * (a @ b) + beta * y + bias        bias[j] for column j
//   y = activation(z)                            or z * derivative'(aux)
//
// With scales, alpha is alpha * scale_a * scale_b. A third multiplies y before
// it is rounded to an 8-bit float.
//
// Products of 16-bit and smaller types accumulate in f32, int8 in int32; alpha,
// bias and activation apply before z is rounded to the dtype of y.
struct GemmProblem {
  GemmPlan plan;
  DType operands = DType::kF32;  // of a and b
  std::optional<DType> b_type;   // of b, if it is another
  DType result = DType::kF32;    // of y and aux
  std::complex<double> alpha = 1, beta = 0;
  // f32 operands may be rounded to TF32, sums of 8-bit floats be less than
  // f32's.
  bool tf32 = false;
  bool bias = false;  // [n], dtype of y; every loop has b_stride 0
  Activation activation = Activation::kNone;
  bool aux = false;  // z is written too, where y is written
  // aux is read, not written.
  Activation derivative = Activation::kNone;
  // Also sums[i] = sum over k of a[i, k], [m], dtype of y; no loops.
  bool sums = false;
  int64_t scales = 0;  // none, of a and b, or also of y: f32 in memory
  // Of the backend's methods, the one that is preferred where it supports this;
  // none if empty.
  std::string method;
};

// What a call says of a problem: the attributes of the FFI target, see
// core/gemm/ffi.cc.
struct GemmAttributes {
  std::string_view spec;
  std::span<const int64_t> a_shape, b_shape;
  std::string_view operand_type, result_type;
  std::span<const double> alpha, beta;
  std::string_view activation, derivative;
  bool bias, aux, sums, tf32;
  int64_t scales;
  std::string_view method;
};

inline Status ParseActivation(std::string_view name, Activation* activation) {
  for (const auto& [known, value] :
       {std::pair<std::string_view, Activation>{"none", Activation::kNone},
        {"relu", Activation::kRelu},
        {"gelu", Activation::kGelu},
        {"gelu_erf", Activation::kGeluErf}}) {
    if (name == known) {
      *activation = value;
      return Status::Ok();
    }
  }
  return Status::Error("gemm: unknown activation " + std::string(name) + ".");
}

inline Status MakeGemmProblem(const GemmAttributes& attributes,
                              GemmProblem* problem) {
  *problem = {};
  const std::string spec(attributes.spec);
  bool in_place = false;
  Status status = MakeGemmPlan(attributes.spec, attributes.a_shape,
                               attributes.b_shape, &problem->plan, &in_place);
  if (status.ok() && !in_place) {
    status = Status::Error("gemm: " + spec +
                           " does not run in place on these shapes.");
  }
  const size_t comma = attributes.operand_type.find(',');
  if (status.ok()) {
    status = ParseDType(attributes.operand_type.substr(0, comma),
                        &problem->operands);
  }
  if (status.ok() && comma != std::string_view::npos) {
    status = ParseDType(attributes.operand_type.substr(comma + 1),
                        &problem->b_type.emplace());
    if (problem->plan.swapped) std::swap(problem->operands, *problem->b_type);
  }
  if (status.ok()) {
    status = ParseDType(attributes.result_type, &problem->result);
  }
  if (status.ok()) {
    status = ParseActivation(attributes.activation, &problem->activation);
  }
  if (status.ok()) {
    status = ParseActivation(attributes.derivative, &problem->derivative);
  }
  if (status.ok() && problem->derivative == Activation::kGeluErf) {
    status = Status::Error("gemm: the derivative of gelu_erf is not fused.");
  }
  if (!status.ok()) return status;
  if (attributes.alpha.size() != 2 || attributes.beta.size() != 2) {
    return Status::Error("gemm: alpha and beta have two parts.");
  }
  problem->alpha = {attributes.alpha[0], attributes.alpha[1]};
  problem->beta = {attributes.beta[0], attributes.beta[1]};
  problem->tf32 = attributes.tf32;
  problem->bias = attributes.bias;
  problem->aux = attributes.aux;
  problem->sums = attributes.sums;
  problem->scales = attributes.scales;
  problem->method = attributes.method;
  if (problem->aux && problem->derivative != Activation::kNone) {
    return Status::Error("gemm: aux is either written or read.");
  }
  bool shared_bias = !problem->plan.swapped;
  for (const GemmLoop& loop : problem->plan.loops) {
    shared_bias &= loop.b_stride == 0;
  }
  if (problem->bias && !shared_bias) {
    return Status::Error("gemm: a bias needs the columns of y last, got " +
                         spec + ".");
  }
  if (problem->sums && (problem->plan.swapped || problem->plan.n == 0 ||
                        !problem->plan.loops.empty())) {
    return Status::Error("gemm: sums need a single product, got " + spec + ".");
  }
  return status;
}

// beta != 0: y holds the addend before and the result after.
struct GemmBuffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  void* aux = nullptr;
  void* sums = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  const void* scale_a = nullptr;
  const void* scale_b = nullptr;
  const void* scale_y = nullptr;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_GEMM_PROBLEM_H_
