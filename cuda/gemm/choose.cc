// SPDX-License-Identifier: Apache-2.0
//
// What cuBLASLt is asked for, and what it is not: all that is known without a
// device.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/device.h"
#include "cuda/gemm/gemm.h"
#include "cuda/gemm/types.h"

namespace jax_layout {
namespace {

constexpr int64_t kMaxBatch = 65535;

std::string Describe(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const auto name = [](Activation activation) {
    if (activation == Activation::kRelu) return "relu";
    return activation == Activation::kGelu ? "gelu" : "gelu_erf";
  };
  std::string text =
      "m=" + std::to_string(plan.m) + ", n=" + std::to_string(plan.n) +
      ", k=" + std::to_string(plan.k) + " of " + Info(problem.operands).name +
      " to " + Info(problem.result).name;
  if (problem.b_type) text += ", b " + std::string(Info(*problem.b_type).name);
  if (problem.scales != 0) text += ", scaled";
  if (plan.a.transposed) text += ", a transposed";
  if (plan.b.transposed) text += ", b transposed";
  if (plan.Steps() != 1) text += ", " + std::to_string(plan.Steps()) + " times";
  if (problem.beta != 0.) text += ", beta";
  if (problem.bias) text += ", bias";
  if (problem.activation != Activation::kNone) {
    text += std::string(", ") + name(problem.activation);
  }
  if (problem.aux) text += ", aux";
  if (problem.derivative != Activation::kNone) {
    text += std::string(", derivative of ") + name(problem.derivative);
  }
  if (problem.sums) text += ", sums";
  if (IsFp8(problem.operands) && problem.tf32) text += ", fast";
  return text;
}

bool HasTypes(const GemmProblem& problem) {
  const DType a = problem.operands, b = problem.b_type.value_or(a);
  const DType result = problem.result;
  if (a != b && !(IsFp8(a) && IsFp8(b))) return false;
  switch (a) {
    case DType::kF32:
    case DType::kF64:
    case DType::kC64:
    case DType::kC128:
      return result == a;
    case DType::kBF16:
    case DType::kF16:
      return result == a || result == DType::kF32;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      if (a == b && a == DType::kF8E5M2) return false;
      return result == DType::kBF16 || result == DType::kF16 ||
             result == DType::kF32 || result == DType::kF8E4M3 ||
             (result == DType::kF8E5M2 && a != b);
    case DType::kS8:
      return result == DType::kS32;
    case DType::kS32:
      return false;
  }
  return false;
}

bool IsInt32(std::complex<double> x) {
  return x.real() == std::nearbyint(x.real()) &&
         x.real() >= std::numeric_limits<int32_t>::min() &&
         x.real() <= std::numeric_limits<int32_t>::max();
}

// 8-bit floats want 16 bytes everywhere; a lone row's stride is never used.
bool HasFp8Layout(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const int64_t bytes = Info(problem.result).bytes;
  bool fits = !plan.a.transposed && plan.b.transposed && plan.k % 16 == 0 &&
              plan.n * bytes % 16 == 0;
  fits &= plan.m <= 1 || (plan.a.ld % 16 == 0 && plan.y.ld * bytes % 16 == 0);
  fits &= plan.n <= 1 || plan.b.ld % 16 == 0;
  for (const GemmLoop& loop : plan.loops) {
    fits &= loop.a_stride % 16 == 0 && loop.b_stride % 16 == 0 &&
            loop.y_stride * bytes % 16 == 0;
  }
  return fits;
}

// Where cuBLASLt can read or write aux: the distance of rows and steps.
bool HasAuxLayout(const GemmPlan& plan) {
  bool fits = plan.m <= 1 || plan.y.ld % 8 == 0;
  for (const GemmLoop& loop : plan.loops) fits &= loop.y_stride % 8 == 0;
  return fits;
}

// Why cuBLASLt cannot, or nothing.
std::string Refusal(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const bool activation = problem.activation != Activation::kNone;
  const bool derivative = problem.derivative != Activation::kNone;
  if (!HasTypes(problem)) {
    return "has no such product";
  }
  if (IsFp8(problem.operands) && plan.k != 0 && !HasFp8Layout(problem)) {
    return "needs k contiguous in both operands of 8-bit floats, and "
           "multiples of 16 bytes";
  }
  if (problem.scales != 0 && !IsFp8(problem.operands)) {
    return "has scales of 8-bit floats alone";
  }
  if (problem.scales == 3 && !IsFp8(problem.result)) {
    return "scales results of 8-bit floats alone";
  }
  if (IsFp8(problem.result) &&
      (problem.beta != 0. || problem.bias || activation || derivative ||
       problem.aux || problem.sums)) {
    return "makes 8-bit floats of the product alone";
  }
  if (!IsComplex(problem.result) &&
      (problem.alpha.imag() != 0 || problem.beta.imag() != 0)) {
    return "needs a real alpha and beta for real results";
  }
  if (problem.result == DType::kS32 &&
      !(IsInt32(problem.alpha) && IsInt32(problem.beta))) {
    return "needs an integer alpha and beta for integer results";
  }
  if ((problem.bias || activation || derivative || problem.aux ||
       problem.sums) &&
      (IsComplex(problem.result) || problem.result == DType::kS32)) {
    return "has nothing but the product for integers and complex numbers";
  }
  if (problem.activation == Activation::kGeluErf) {
    return "has no gelu of the error function";
  }
  // Its gelu is off by 2.6e-10 in float64, on an H100 with CUDA 13.0: constants
  // or a tanh that are not of that precision.
  if ((problem.activation == Activation::kGelu ||
       problem.derivative == Activation::kGelu) &&
      problem.result == DType::kF64) {
    return "has no gelu of float64's precision";
  }
  if (problem.bias && IsFp8(problem.operands) &&
      problem.result == DType::kF32) {
    return "has no float32 bias for 8-bit floats";
  }
  if (problem.derivative == Activation::kRelu ||
      (problem.aux && problem.activation != Activation::kGelu)) {
    return "keeps z for gelu alone";
  }
  if (derivative && (problem.bias || activation || problem.sums)) {
    return "multiplies nothing but alpha * (a @ b) + beta * y by a derivative";
  }
  if ((problem.aux || derivative) && !HasAuxLayout(plan)) {
    return "needs rows and steps of aux a multiple of 8 elements apart";
  }
  if (problem.sums &&
      (problem.bias || activation || problem.alpha != 1. || plan.n == 0)) {
    return "has sums with a plain product of some columns alone";
  }
  return "";
}

lt::ComputeType ChooseCompute(const GemmProblem& problem) {
  switch (problem.operands) {
    case DType::kF64:
    case DType::kC128:
      return lt::kCompute64F;
    case DType::kS8:
      return lt::kCompute32I;
    case DType::kF32:
    case DType::kC64:
      return problem.tf32 ? lt::kCompute32FFastTF32 : lt::kCompute32F;
    default:
      return lt::kCompute32F;
  }
}

lt::DataType ChooseScale(DType operands) {
  switch (operands) {
    case DType::kF64:
    case DType::kC64:
    case DType::kC128:
      return Info(operands).type;
    case DType::kS8:
      return lt::kR32I;
    default:
      return lt::kR32F;
  }
}

template <typename T>
void Put(T value, std::array<std::byte, 16>* to) {
  std::memcpy(to->data(), &value, sizeof(value));
}

void PutScalar(std::complex<double> value, lt::DataType type,
               std::array<std::byte, 16>* to) {
  switch (type) {
    case lt::kR64F:
      return Put(value.real(), to);
    case lt::kR32I:
      return Put(static_cast<int32_t>(value.real()), to);
    case lt::kC32F:
      return Put(std::complex<float>(value), to);
    case lt::kC64F:
      return Put(value, to);
    default:
      return Put(static_cast<float>(value.real()), to);
  }
}

// Of a problem that Refusal lets pass.
lt::Epilogue ChooseEpilogue(const GemmProblem& problem) {
  if (problem.sums) return lt::kBGradB;
  if (problem.derivative == Activation::kGelu) return lt::kDGelu;
  switch (problem.activation) {
    case Activation::kNone:
      return problem.bias ? lt::kBias : lt::kDefault;
    case Activation::kRelu:
      return problem.bias ? lt::kReluBias : lt::kRelu;
    case Activation::kGelu:
      if (problem.aux) return problem.bias ? lt::kGeluAuxBias : lt::kGeluAux;
      return problem.bias ? lt::kGeluBias : lt::kGelu;
    case Activation::kGeluErf:
      break;
  }
  return lt::kDefault;
}

// alpha * (a @ b) is 0 without a and b being read.
void DropProduct(GemmKernel* kernel) {
  GemmProblem& problem = kernel->problem;
  const bool plain =
      !problem.bias && problem.derivative == Activation::kNone &&
      (problem.beta == 0. ||
       (problem.beta == 1. && problem.activation == Activation::kNone));
  kernel->work = plain ? GemmKernel::kFill : GemmKernel::kMultiplyZeros;
  problem.alpha = 1;
  problem.plan.k = kZerosK;
  problem.plan.a = {false, kZerosK};
  problem.plan.b = {true, kZerosK};
  for (GemmLoop& loop : problem.plan.loops) loop.a_stride = loop.b_stride = 0;
}

}  // namespace

std::vector<std::string> GemmMethods(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  // What a Hopper GPU wants of int8, and says only when the GEMM first runs.
  const bool fits =
      problem.operands != DType::kS8 ||
      (!plan.a.transposed && plan.b.transposed &&
       (plan.k | plan.n | plan.a.ld | plan.b.ld | plan.y.ld) % 4 == 0);
  if (!fits || !Refusal(problem).empty()) return {};
  return {"cuBLASLt"};
}

std::string GemmObstacle(const GemmProblem& problem) {
  if (!HasDevices()) return "";
  constexpr int64_t kWorkspace = 32 << 20;
  GemmKernel kernel;
  Status status = ChooseGemmKernel(problem, &kernel);
  if (status.ok()) status = TryGemm(kernel, kWorkspace);
  return status.message;
}

Status ChooseGemmKernel(const GemmProblem& problem, GemmKernel* kernel) {
  *kernel = {};
  kernel->problem = problem;
  kernel->text = Describe(problem);
  const std::string refusal = Refusal(problem);
  if (!refusal.empty()) {
    return Status::Error("gemm: cuBLASLt " + refusal + ", got " + kernel->text +
                         ".");
  }
  if (problem.alpha == 0. || problem.plan.k == 0) DropProduct(kernel);
  kernel->compute = ChooseCompute(problem);
  kernel->scale = ChooseScale(problem.operands);
  kernel->epilogue = ChooseEpilogue(problem);
  PutScalar(kernel->problem.alpha, kernel->scale, &kernel->alpha);
  PutScalar(kernel->problem.beta, kernel->scale, &kernel->beta);

  // Pieces as even as they come: two descriptors at most.
  kernel->walked = kernel->problem.plan.loops;
  const auto largest = std::max_element(
      kernel->walked.begin(), kernel->walked.end(),
      [](const GemmLoop& p, const GemmLoop& q) { return p.extent < q.extent; });
  if (largest != kernel->walked.end()) {
    kernel->batch = *largest;
    kernel->walked.erase(largest);
    const int64_t extent = std::max<int64_t>(1, kernel->batch.extent);
    kernel->piece = CeilDiv(extent, CeilDiv(extent, kMaxBatch));
  }
  kernel->launches = NoGemmLaunches();
  return Status::Ok();
}

}  // namespace jax_layout
