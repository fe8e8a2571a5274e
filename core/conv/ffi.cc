// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_conv": see core/conv/problem.h for what it
// computes.
//
//   operands  of x, w and y the two that the pass reads, in this order, but
//             y first for "input_grad"; then
//             bias, [out channels]                        bias
//   results   the third; then
//             workspace, uint8                            optional
//   pass_     string, "forward", "input_grad", "weight_grad"
//   type      string, the dtype of the operands, "bfloat16"
//   result    string, the dtype of the result and the bias
//   x_shape, w_shape, y_shape  int64[], extents in memory, row-major
//   x_order, w_order, y_order  int64[]; which axis is the batch (of w: the out
//             channels), the channels (of w: the in channels of a group), then
//             the spatial axes
//   x_block, y_block  int64; above 1, one more axis, the last, is the inner
//   part
//             of the channels
//   stride, dilation, pad_low, pad_high  int64[], per spatial axis
//   groups    int64
//   bias, relu  bool
//   w_format  string, "" if w lies as its shape and order say; else the order
//             of the kernel's own, see core/conv/problem.h
//   winograd  bool, whether products may be saved so, see there
//   method    string, one of the backend's that shall compute it, if it can;
//             "": the first that can
//
// Shapes and order are those of the attributes: what the buffers say of theirs
// is not read.
#include <memory>

#include "conv/conv.h"  // the backend's
#include "core/conv/plan.h"
#include "core/registry.h"
#include "platform.h"  // the backend's

namespace jax_layout {
namespace {

struct ConvState {
  static constexpr char kName[] = "jax_layout_conv";
  static ffi::TypeId id;
  ConvKernel kernel;
  int64_t x_count = 1, w_count = 1, y_count = 1;
};
ffi::TypeId ConvState::id = XLA_FFI_UNKNOWN_TYPE_ID;

// In the order of DType.
constexpr ffi::DataType kFfiTypes[] = {
    ffi::F32,    ffi::F64, ffi::BF16, ffi::F16, ffi::F8E4M3FN,
    ffi::F8E5M2, ffi::S8,  ffi::S32,  ffi::C64, ffi::C128};

using Axes = ffi::Span<const int64_t>;

std::span<const int64_t> ToSpan(const Axes& axes) {
  return {axes.begin(), axes.size()};
}

int64_t Count(const Axes& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

ffi::ErrorOr<std::unique_ptr<ConvState>> Instantiate(
    std::string_view pass, std::string_view type, std::string_view result,
    Axes x_shape, Axes w_shape, Axes y_shape, Axes x_order, Axes w_order,
    Axes y_order, int64_t x_block, int64_t y_block, Axes stride, Axes dilation,
    Axes pad_low, Axes pad_high, int64_t groups, bool bias, bool relu,
    std::string_view w_format, bool winograd, std::string_view method) {
  auto state = std::make_unique<ConvState>();
  ConvProblem problem;
  Status status = MakeConvProblem({pass,
                                   type,
                                   result,
                                   ToSpan(x_shape),
                                   ToSpan(w_shape),
                                   ToSpan(y_shape),
                                   ToSpan(x_order),
                                   ToSpan(w_order),
                                   ToSpan(y_order),
                                   x_block,
                                   y_block,
                                   ToSpan(stride),
                                   ToSpan(dilation),
                                   ToSpan(pad_low),
                                   ToSpan(pad_high),
                                   groups,
                                   bias,
                                   relu,
                                   w_format,
                                   winograd},
                                  &problem);
  if (status.ok()) status = ChooseConvKernel(problem, method, &state->kernel);
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  state->x_count = Count(x_shape);
  state->w_count = Count(w_shape);
  state->y_count = Count(y_shape);
  return state;
}

Status Check(const char* name, const ffi::AnyBuffer& buffer, int64_t count,
             DType type) {
  if (static_cast<int64_t>(buffer.element_count()) == count &&
      buffer.element_type() == kFfiTypes[static_cast<int>(type)]) {
    return Status::Ok();
  }
  return Status::Error(
      std::string("conv: ") + name + " must have " + std::to_string(count) +
      " elements of " + std::string(kDTypeNames[static_cast<int>(type)]) +
      ", got " + std::to_string(buffer.element_count()) + " of type " +
      std::to_string(static_cast<int>(buffer.element_type())) + ".");
}

ffi::Error Execute(ConvState* state, ExecutorContext::Type context,
                   ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  const ConvProblem& problem = state->kernel.problem;
  const size_t operands = problem.bias ? 3 : 2;
  if (args.size() != operands || rets.size() < 1 || rets.size() > 2) {
    return ffi::Error::InvalidArgument(
        "conv: expected " + std::to_string(operands) +
        " operands and 1 or 2 results, got " + std::to_string(args.size()) +
        " and " + std::to_string(rets.size()) + ".");
  }
  struct Array {
    const char* name;
    int64_t count;
    void** data;
  };
  ConvBuffers buffers;
  const Array x = {"x", state->x_count, &buffers.x};
  const Array w = {"w", state->w_count, &buffers.w};
  const Array y = {"y", state->y_count, &buffers.y};
  const Array arrays[3][3] = {{x, w, y}, {y, w, x}, {x, y, w}};  // by pass
  const Array* const used = arrays[static_cast<int>(problem.pass)];
  Status status;
  for (int i = 0; i < 3 && status.ok(); ++i) {
    const ffi::AnyBuffer buffer =
        i < 2 ? *args.get<ffi::AnyBuffer>(i) : **rets.get<ffi::AnyBuffer>(0);
    status = Check(used[i].name, buffer, used[i].count,
                   i < 2 ? problem.type : problem.result);
    *used[i].data = buffer.untyped_data();
  }
  if (status.ok() && problem.bias) {
    const ffi::AnyBuffer bias = *args.get<ffi::AnyBuffer>(2);
    status = Check("bias", bias, problem.out_channels, problem.result);
    buffers.bias = bias.untyped_data();
  }
  if (!status.ok()) return ToError(status);
  if (rets.size() == 2) {
    const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(1);
    buffers.workspace = workspace.untyped_data();
    buffers.workspace_bytes = static_cast<int64_t>(workspace.size_bytes());
  }
  return ToError(Conv(state->kernel, buffers, ToExecutor(context)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("pass_")
                           .Attr<std::string_view>("type")
                           .Attr<std::string_view>("result")
                           .Attr<Axes>("x_shape")
                           .Attr<Axes>("w_shape")
                           .Attr<Axes>("y_shape")
                           .Attr<Axes>("x_order")
                           .Attr<Axes>("w_order")
                           .Attr<Axes>("y_order")
                           .Attr<int64_t>("x_block")
                           .Attr<int64_t>("y_block")
                           .Attr<Axes>("stride")
                           .Attr<Axes>("dilation")
                           .Attr<Axes>("pad_low")
                           .Attr<Axes>("pad_high")
                           .Attr<int64_t>("groups")
                           .Attr<bool>("bias")
                           .Attr<bool>("relu")
                           .Attr<std::string_view>("w_format")
                           .Attr<bool>("winograd")
                           .Attr<std::string_view>("method"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<ConvState>>()
                           .Ctx<ExecutorContext::Tag>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),  // read in Instantiate
                       {ffi::Traits::kCmdBufferCompatible});

JAX_LAYOUT_REGISTER(conv, kInstantiate, kExecute, ConvState);

}  // namespace
}  // namespace jax_layout
