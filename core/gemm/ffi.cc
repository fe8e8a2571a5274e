// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_gemm". See core/gemm/problem.h for what it
// computes, and core/gemm/plan.h for the notation.
//
//   operands  a, b, then of these what the attributes name:
//             addend, the size of y, aliased to it   beta != 0
//             bias, [n]                              bias
//             aux, the size of y                     derivative != "none"
//             float32 scales of a, b                 scales >= 2
//             float32 scale of y                     scales == 3
//             number of a block, int32 or int64      a_part, then b_part
//   results   y, then
//             aux, the size of y                     aux
//             sums, [m]                              sums
//             workspace, uint8                       workspace
//   spec          string, the contraction, "mk,kn->mn"
//   a_shape       int64[], the extents of a
//   b_shape       int64[], the extents of b
//   operand_type  string, the dtype of a and b, "bfloat16", or both,
//                 "float8_e4m3fn,float8_e5m2"
//   result_type   string, the dtype of all else
//   alpha, beta   float64[2], real and imaginary part
//   activation, derivative  string, "none", "relu", "gelu"; "gelu_erf" is an
//                activation alone
//   bias, aux, sums, workspace, tf32  bool
//   scales        int64, 0, 2 or 3
//   method        string, which of the backend's is preferred, "" for any
//   a_part, b_part  bool, on CPUs: the operand is an array of such matrices, of
//                which the number says which is meant; one out of range is the
//                nearest
#include <algorithm>
#include <memory>

#include "core/gemm/problem.h"
#include "core/registry.h"
#include "gemm/gemm.h"  // the backend's
#include "platform.h"   // the backend's

namespace jax_layout {
namespace {

struct GemmState {
  static constexpr char kName[] = "jax_layout_gemm";
  static ffi::TypeId id;
  GemmProblem problem;
  bool workspace = false, a_part = false, b_part = false;
  int64_t a_count = 1, b_count = 1, y_count = 1;
  GemmKernel kernel;
};
ffi::TypeId GemmState::id = XLA_FFI_UNKNOWN_TYPE_ID;

// In the order of DType.
constexpr ffi::DataType kFfiTypes[] = {
    ffi::F32,    ffi::F64, ffi::BF16, ffi::F16, ffi::F8E4M3FN,
    ffi::F8E5M2, ffi::S8,  ffi::S32,  ffi::C64, ffi::C128};

int64_t Count(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

ffi::ErrorOr<std::unique_ptr<GemmState>> Instantiate(
    std::string_view spec, ffi::Span<const int64_t> a_shape,
    ffi::Span<const int64_t> b_shape, std::string_view operand_type,
    std::string_view result_type, ffi::Span<const double> alpha,
    ffi::Span<const double> beta, std::string_view activation,
    std::string_view derivative, bool bias, bool aux, bool sums, bool workspace,
    bool tf32, int64_t scales, std::string_view method, bool a_part,
    bool b_part) {
  auto state = std::make_unique<GemmState>();
  GemmProblem& problem = state->problem;
  const std::span<const int64_t> a(a_shape.begin(), a_shape.size());
  const std::span<const int64_t> b(b_shape.begin(), b_shape.size());
  Status status = MakeGemmProblem({spec,
                                   a,
                                   b,
                                   operand_type,
                                   result_type,
                                   {alpha.begin(), alpha.size()},
                                   {beta.begin(), beta.size()},
                                   activation,
                                   derivative,
                                   bias,
                                   aux,
                                   sums,
                                   tf32,
                                   scales,
                                   method},
                                  &problem);
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  if ((a_part || b_part) && !kSharesMemory) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "gemm: parts of arrays are read on CPUs alone."));
  }
  state->workspace = workspace;
  state->a_part = a_part;
  state->b_part = b_part;
  state->a_count = Count(a);
  state->b_count = Count(b);
  state->y_count = problem.plan.m * problem.plan.n * problem.plan.Steps();
  status = ChooseGemmKernel(problem, &state->kernel);
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  return state;
}

// Takes buffers off a handler's arguments one after the other, each checked.
template <typename Buffers>
class Taker {
 public:
  Taker(const char* what, Buffers buffers) : what_(what), buffers_(buffers) {}

  void* Take(const char* name, int64_t count, DType type,
             int64_t* blocks = nullptr) {
    ffi::AnyBuffer buffer = Next();
    if (!status_.ok()) return nullptr;
    const ffi::DataType wanted = kFfiTypes[static_cast<int>(type)];
    const auto elements = static_cast<int64_t>(buffer.element_count());
    const bool is_part = blocks != nullptr && count > 0;
    if (is_part) *blocks = elements / count;
    const bool fits =
        is_part ? elements > 0 && elements % count == 0 : elements == count;
    if (!fits || buffer.element_type() != wanted) {
      status_ = Status::Error(
          std::string("gemm: ") + what_ + " " + name + " must have " +
          std::to_string(count) + " elements of " +
          std::string(kDTypeNames[static_cast<int>(type)]) + ", got " +
          std::to_string(buffer.element_count()) + " of type " +
          std::to_string(static_cast<int>(buffer.element_type())) + ".");
      return nullptr;
    }
    return buffer.untyped_data();
  }

  void* TakeBytes(int64_t* bytes) {
    ffi::AnyBuffer buffer = Next();
    if (!status_.ok()) return nullptr;
    *bytes = static_cast<int64_t>(buffer.size_bytes());
    return buffer.untyped_data();
  }

  // The number of a block, of which there are `blocks`.
  int64_t TakeNumber(int64_t blocks) {
    ffi::AnyBuffer buffer = Next();
    if (!status_.ok()) return 0;
    const ffi::DataType type = buffer.element_type();
    if (buffer.element_count() != 1 || (type != ffi::S32 && type != ffi::S64)) {
      status_ = Status::Error(
          "gemm: the number of a block must be one int32 or int64.");
      return 0;
    }
    const void* data = buffer.untyped_data();
    const int64_t number = type == ffi::S32
                               ? *static_cast<const int32_t*>(data)
                               : *static_cast<const int64_t*>(data);
    return std::clamp<int64_t>(number, 0, blocks - 1);
  }

  // Whether all was there, and nothing else.
  Status Finish() {
    if (status_.ok() && next_ != buffers_.size()) {
      return Status::Error(std::string("gemm: got ") +
                           std::to_string(buffers_.size()) + " " + what_ +
                           "s, expected " + std::to_string(next_) + ".");
    }
    return status_;
  }

 private:
  ffi::AnyBuffer Next() {
    auto buffer = buffers_.template get<ffi::AnyBuffer>(next_);
    ++next_;
    if (!buffer.has_value()) {
      if (status_.ok()) {
        status_ = Status::Error(std::string("gemm: ") + what_ + " " +
                                std::to_string(next_ - 1) + " is missing.");
      }
      return ffi::AnyBuffer(nullptr);
    }
    return Value(*buffer);
  }
  static ffi::AnyBuffer Value(ffi::AnyBuffer buffer) { return buffer; }
  static ffi::AnyBuffer Value(ffi::Result<ffi::AnyBuffer> buffer) {
    return *buffer;
  }

  const char* what_;
  Buffers buffers_;
  size_t next_ = 0;
  Status status_;
};

ffi::Error Execute(GemmState* state, ExecutorContext::Type context,
                   ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  const GemmProblem& problem = state->problem;
  Taker operands("operand", args);
  Taker results("result", rets);
  GemmBuffers buffers;
  DType a_type = problem.operands;
  DType b_type = problem.b_type.value_or(a_type);
  if (problem.plan.swapped) std::swap(a_type, b_type);
  int64_t a_blocks = 1, b_blocks = 1;
  buffers.a = operands.Take("a", state->a_count, a_type,
                            state->a_part ? &a_blocks : nullptr);
  buffers.b = operands.Take("b", state->b_count, b_type,
                            state->b_part ? &b_blocks : nullptr);
  buffers.y = results.Take("y", state->y_count, problem.result);
  if (problem.beta != 0.) {
    const void* addend =
        operands.Take("addend", state->y_count, problem.result);
    if (addend != buffers.y) {
      return ffi::Error::InvalidArgument("gemm: the addend must alias y.");
    }
  }
  if (problem.bias) {
    buffers.bias = operands.Take("bias", problem.plan.n, problem.result);
  }
  if (problem.derivative != Activation::kNone) {
    buffers.aux = operands.Take("aux", state->y_count, problem.result);
  }
  if (problem.scales >= 2) {
    buffers.scale_a = operands.Take("scale_a", 1, DType::kF32);
    buffers.scale_b = operands.Take("scale_b", 1, DType::kF32);
    if (problem.plan.swapped) std::swap(buffers.scale_a, buffers.scale_b);
  }
  if (problem.scales == 3) {
    buffers.scale_y = operands.Take("scale_result", 1, DType::kF32);
  }
  // Where an operand begins, one of the blocks of what was given.
  const auto part = [&](const void* data, int64_t count, DType type,
                        int64_t blocks) {
    const int64_t offset = operands.TakeNumber(blocks) * count * ItemSize(type);
    return static_cast<const char*>(data) + offset;
  };
  if (state->a_part)
    buffers.a = part(buffers.a, state->a_count, a_type, a_blocks);
  if (state->b_part)
    buffers.b = part(buffers.b, state->b_count, b_type, b_blocks);
  if (problem.plan.swapped) std::swap(buffers.a, buffers.b);
  if (problem.aux) {
    buffers.aux = results.Take("aux", state->y_count, problem.result);
  }
  if (problem.sums) {
    buffers.sums = results.Take("sums", problem.plan.m, problem.result);
  }
  if (state->workspace) {
    buffers.workspace = results.TakeBytes(&buffers.workspace_bytes);
  }
  Status status = operands.Finish();
  if (status.ok()) status = results.Finish();
  if (!status.ok()) return ToError(status);
  if (state->y_count == 0) return ffi::Error::Success();
  return ToError(Gemm(state->kernel, buffers, ToExecutor(context)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("spec")
                           .Attr<ffi::Span<const int64_t>>("a_shape")
                           .Attr<ffi::Span<const int64_t>>("b_shape")
                           .Attr<std::string_view>("operand_type")
                           .Attr<std::string_view>("result_type")
                           .Attr<ffi::Span<const double>>("alpha")
                           .Attr<ffi::Span<const double>>("beta")
                           .Attr<std::string_view>("activation")
                           .Attr<std::string_view>("derivative")
                           .Attr<bool>("bias")
                           .Attr<bool>("aux")
                           .Attr<bool>("sums")
                           .Attr<bool>("workspace")
                           .Attr<bool>("tf32")
                           .Attr<int64_t>("scales")
                           .Attr<std::string_view>("method")
                           .Attr<bool>("a_part")
                           .Attr<bool>("b_part"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<GemmState>>()
                           .Ctx<ExecutorContext::Tag>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),  // read in Instantiate
                       {ffi::Traits::kCmdBufferCompatible});

JAX_LAYOUT_REGISTER(gemm, kInstantiate, kExecute, GemmState);

}  // namespace
}  // namespace jax_layout
