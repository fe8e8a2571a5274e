// SPDX-License-Identifier: Apache-2.0
//
// From the attributes of the FFI target "jax_layout_conv" to a ConvProblem.
#ifndef JAX_LAYOUT_CORE_CONV_PLAN_H_
#define JAX_LAYOUT_CORE_CONV_PLAN_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "core/conv/problem.h"
#include "core/status.h"

namespace jax_layout {

// What a call says of a convolution, see core/conv/ffi.cc.
struct ConvAttributes {
  std::string_view pass, type, result;
  std::span<const int64_t> x_shape, w_shape, y_shape;  // as in memory
  std::span<const int64_t> x_order, w_order, y_order;
  int64_t x_block = 1, y_block = 1;
  std::span<const int64_t> stride, dilation, pad_low, pad_high;
  int64_t groups = 1;
  bool bias = false, relu = false;
  std::string_view w_format = {};
  bool winograd = false;
};

namespace conv_internal {

inline std::string Text(std::span<const int64_t> values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + ")";
}

// One array: the extents of n and c (of o and i), in *outer, of the spatial
// axes, in *spatial, and where they lie.
inline Status ReadArray(const char* name, size_t rank,
                        std::span<const int64_t> shape,
                        std::span<const int64_t> order, int64_t block,
                        std::array<int64_t, 2>* outer,
                        std::array<int64_t, 3>* spatial, ConvLayout* layout) {
  const std::string what = std::string("conv: ") + name;
  const size_t axes = rank + 2;
  if (block < 1) {
    return Status::Error(what + "_block must be positive, got " +
                         std::to_string(block) + ".");
  }
  if (shape.size() != axes + (block > 1) ||
      (block > 1 && shape.back() != block)) {
    return Status::Error(
        what + "_shape must have " + std::to_string(axes) + " axes" +
        (block > 1 ? " and one of size " + std::to_string(block) : "") +
        ", got " + Text(shape) + ".");
  }
  bool permutes = order.size() == axes;
  for (size_t i = 0; permutes && i < axes; ++i) {
    permutes = std::count(order.begin(), order.end(), i) == 1;
  }
  if (!permutes) {
    return Status::Error(what + "_order must reorder " + std::to_string(axes) +
                         " axes, got " + Text(order) + ".");
  }
  int64_t bytes = 16;  // of the largest element
  for (int64_t extent : shape) {
    if (extent < 0) {
      return Status::Error(what + "_shape must not be negative, got " +
                           Text(shape) + ".");
    }
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) {
      return Status::Error(what + " must be smaller than 2^63 bytes, got " +
                           Text(shape) + ".");
    }
  }
  const auto stride = [shape](int64_t axis) {
    int64_t stride = 1;
    for (size_t i = axis + 1; i < shape.size(); ++i) stride *= shape[i];
    return stride;
  };
  *layout = {};
  layout->block = block;
  *outer = {shape[order[0]], shape[order[1]] * block};
  layout->strides[0] = stride(order[0]);
  layout->strides[1] = stride(order[1]);
  *spatial = {1, 1, 1};
  for (size_t i = 0; i < rank; ++i) {
    (*spatial)[3 - rank + i] = shape[order[2 + i]];
    layout->strides[5 - rank + i] = stride(order[2 + i]);
  }
  return Status::Ok();
}

inline Status ReadPass(std::string_view name, ConvPass* pass) {
  constexpr std::string_view kNames[] = {"forward", "input_grad",
                                         "weight_grad"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) {
      *pass = static_cast<ConvPass>(i);
      return Status::Ok();
    }
  }
  return Status::Error(
      "conv: pass_ must be forward, input_grad or weight_grad, got " +
      std::string(name) + ".");
}

// Extents along one axis are below 2^59, and so must be what pads and kernels
// add up to.
inline constexpr int64_t kMaxExtent = int64_t{1} << 60;

}  // namespace conv_internal

// How many positions a kernel of `taps` has along an axis.
inline int64_t ConvOutExtent(int64_t in, int64_t taps, int64_t stride,
                             int64_t dilation, int64_t pad_low,
                             int64_t pad_high) {
  const int64_t reach = taps > 0 ? (taps - 1) * dilation + 1 : 0;
  const int64_t room = in + pad_low + pad_high - reach;
  return room < 0 ? 0 : room / stride + 1;
}

inline Status MakeConvProblem(const ConvAttributes& a, ConvProblem* problem) {
  using conv_internal::kMaxExtent;
  using conv_internal::Text;
  ConvProblem& p = *problem;
  p = {};
  const size_t rank = a.stride.size();
  if (rank < 1 || rank > 3) {
    return Status::Error("conv: 1 to 3 spatial axes are supported, got " +
                         std::to_string(rank) + ".");
  }
  struct PerAxis {
    const char* name;
    std::span<const int64_t> values;
    int64_t least;
    std::array<int64_t, 3>* to;
  };
  for (const PerAxis& x :
       {PerAxis{"stride", a.stride, 1, &p.stride},
        PerAxis{"dilation", a.dilation, 1, &p.dilation},
        PerAxis{"pad_low", a.pad_low, -kMaxExtent, &p.pad_low},
        PerAxis{"pad_high", a.pad_high, -kMaxExtent, &p.pad_high}}) {
    bool valid = x.values.size() == rank;
    for (int64_t value : x.values) {
      valid &= value >= x.least && value <= kMaxExtent;
    }
    if (!valid) {
      return Status::Error(std::string("conv: ") + x.name + " must be " +
                           (x.least == 1 ? "positive" : "given") +
                           " for each of " + std::to_string(rank) +
                           " spatial axes, got " + Text(x.values) + ".");
    }
    std::copy(x.values.begin(), x.values.end(), x.to->begin() + 3 - rank);
  }

  std::array<int64_t, 2> x_outer, w_outer, y_outer;
  Status status = conv_internal::ReadPass(a.pass, &p.pass);
  if (status.ok()) status = ParseDType(a.type, &p.type);
  if (status.ok()) status = ParseDType(a.result, &p.result);
  if (status.ok()) {
    status = conv_internal::ReadArray("x", rank, a.x_shape, a.x_order,
                                      a.x_block, &x_outer, &p.in, &p.x);
  }
  if (status.ok()) {
    status = conv_internal::ReadArray("w", rank, a.w_shape, a.w_order, 1,
                                      &w_outer, &p.kernel, &p.w);
  }
  if (status.ok()) {
    status = conv_internal::ReadArray("y", rank, a.y_shape, a.y_order,
                                      a.y_block, &y_outer, &p.out, &p.y);
  }
  if (!status.ok()) return status;

  p.batch = x_outer[0];
  p.in_channels = x_outer[1];
  p.out_channels = y_outer[1];
  p.groups = a.groups;
  p.bias = a.bias;
  p.relu = a.relu;
  p.w_format = a.w_format;
  p.winograd = a.winograd;
  if (y_outer[0] != p.batch) {
    return Status::Error("conv: x and y must have one batch size, got " +
                         std::to_string(p.batch) + " and " +
                         std::to_string(y_outer[0]) + ".");
  }
  if (p.groups < 1 || p.in_channels % p.groups != 0 ||
      p.out_channels % p.groups != 0) {
    return Status::Error("conv: channels must be divisible by groups, got " +
                         std::to_string(p.in_channels) + " and " +
                         std::to_string(p.out_channels) +
                         " channels and groups=" + std::to_string(p.groups) +
                         ".");
  }
  if (w_outer[0] != p.out_channels || w_outer[1] != p.in_channels / p.groups) {
    return Status::Error("conv: w must have " + std::to_string(p.out_channels) +
                         " and " + std::to_string(p.in_channels / p.groups) +
                         " channels, got " + std::to_string(w_outer[0]) +
                         " and " + std::to_string(w_outer[1]) + ".");
  }
  for (int i = 0; i < 3; ++i) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<int64_t>(p.kernel[i] - 1, 0),
                               p.dilation[i], &reach) ||
        reach > kMaxExtent) {
      return Status::Error("conv: dilation is too large, got " +
                           Text(a.dilation) + ".");
    }
    const int64_t out =
        ConvOutExtent(p.in[i], p.kernel[i], p.stride[i], p.dilation[i],
                      p.pad_low[i], p.pad_high[i]);
    if (p.out[i] != out) {
      return Status::Error("conv: y must have extent " + std::to_string(out) +
                           " along spatial axis " +
                           std::to_string(i - 3 + static_cast<int>(rank)) +
                           ", got " + std::to_string(p.out[i]) + ".");
    }
  }
  if (p.pass != ConvPass::kForward && (p.bias || p.relu)) {
    return Status::Error("conv: bias and relu are of the forward pass, got " +
                         std::string(a.pass) + ".");
  }
  if (!p.w_format.empty() &&
      (p.pass != ConvPass::kForward ||
       !std::is_sorted(a.w_order.begin(), a.w_order.end()))) {
    return Status::Error(
        "conv: w_format is of the forward pass, with w_order as the axes are, "
        "got " +
        std::string(a.pass) + " and " + Text(a.w_order) + ".");
  }
  // Blocks next to each other are no blocks.
  for (ConvLayout* layout : {&p.x, &p.y}) {
    if (layout->strides[1] != layout->block) continue;
    layout->strides[1] = layout->block = 1;
  }
  return Status::Ok();
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_CONV_PLAN_H_
