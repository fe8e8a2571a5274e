// SPDX-License-Identifier: Apache-2.0
//
// A convolution of images, and what it is: loops over every product.
#ifndef JAX_LAYOUT_TESTS_ARM_CONV_H_
#define JAX_LAYOUT_TESTS_ARM_CONV_H_

#include <array>
#include <cstdint>
#include <vector>

#include "core/conv/problem.h"
#include "tests/arm/check.h"

namespace jax_layout {

enum class Order { kLast, kPlanes, kBlocks };  // NHWC, NCHW, NCHW8c

inline ConvLayout ImagesLayout(Order order, int64_t channels, int64_t height,
                               int64_t width) {
  const int64_t plane = height * width;
  switch (order) {
    case Order::kLast:
      return {{plane * channels, 1, 0, width * channels, channels}, 1};
    case Order::kPlanes:
      return {{plane * channels, plane, 0, width, 1}, 1};
    default:
      return {{plane * channels, plane * 8, 0, width * 8, 8}, 8};
  }
}

struct ConvCase {
  ConvPass pass = ConvPass::kForward;
  DType type = DType::kF32, result = DType::kF32;
  Order order = Order::kLast;
  bool taps_first = false;  // w is HWIO, else OIHW
  int64_t batch = 1, groups = 1, in_channels = 1, out_channels = 1;
  std::array<int64_t, 2> in = {1, 1}, kernel = {1, 1}, stride = {1, 1},
                         dilation = {1, 1}, low = {0, 0}, high = {0, 0};
  bool bias = false, relu = false, winograd = false;
  bool infinite = false;  // one element of what is read with w
  int threads = 2;

  int64_t Out(int d) const {
    return (in[d] + low[d] + high[d] - dilation[d] * (kernel[d] - 1) - 1) /
               stride[d] +
           1;
  }
  bool Valid() const {
    for (int d : {0, 1}) {
      if (in[d] + low[d] + high[d] <= dilation[d] * (kernel[d] - 1)) {
        return false;
      }
    }
    return true;
  }

  ConvProblem Problem() const {
    ConvProblem p;
    p.pass = pass;
    p.type = type;
    p.result = result;
    p.batch = batch;
    p.groups = groups;
    p.in_channels = in_channels;
    p.out_channels = out_channels;
    for (int d : {0, 1}) {
      p.in[d + 1] = in[d];
      p.kernel[d + 1] = kernel[d];
      p.out[d + 1] = Out(d);
      p.stride[d + 1] = stride[d];
      p.dilation[d + 1] = dilation[d];
      p.pad_low[d + 1] = low[d];
      p.pad_high[d + 1] = high[d];
    }
    p.x = ImagesLayout(order, in_channels, in[0], in[1]);
    p.y = ImagesLayout(order, out_channels, Out(0), Out(1));
    const int64_t each = in_channels / groups, taps = kernel[0] * kernel[1];
    if (taps_first) {
      p.w.strides = {1, out_channels, 0, kernel[1] * each * out_channels,
                     each * out_channels};
    } else {
      p.w.strides = {each * taps, taps, 0, kernel[1], 1};
    }
    p.bias = bias;
    p.relu = relu;
    p.winograd = winograd;
    return p;
  }

  std::string Describe() const {
    return Text("pass", static_cast<int>(pass), Name(type), Name(result),
                "order", static_cast<int>(order), "batch", batch, "groups",
                groups, "channels", in_channels, out_channels, "in", in[0],
                in[1], "kernel", kernel[0], kernel[1], "stride", stride[0],
                stride[1], "dilation", dilation[0], dilation[1], "pad", low[0],
                high[0], low[1], high[1], "bias", bias, "relu", relu,
                "infinite", infinite, "threads", threads);
  }
};

inline int64_t ElementAt(const ConvLayout& layout, int64_t n, int64_t c,
                         int64_t row, int64_t col) {
  return n * layout.strides[0] + c / layout.block * layout.strides[1] +
         c % layout.block + row * layout.strides[3] + col * layout.strides[4];
}

// Runs `kernel` (problem, buffers, executor) with `workspace` bytes and
// compares all that it writes.
template <class Kernel>
void CheckConv(const ConvCase& c, int64_t workspace, Random* random,
               const Kernel& kernel) {
  const ConvProblem p = c.Problem();
  const bool forward = c.pass == ConvPass::kForward;
  const bool weights = c.pass == ConvPass::kWeightGrad;
  const auto of = [&](bool written) { return written ? c.result : c.type; };
  Array x(of(c.pass == ConvPass::kInputGrad),
          c.batch * c.in_channels * c.in[0] * c.in[1]);
  Array w(of(weights), c.out_channels * c.in_channels / c.groups * c.kernel[0] *
                           c.kernel[1]);
  Array y(of(forward), c.batch * c.out_channels * c.Out(0) * c.Out(1));
  Array bias(c.result, c.out_channels);
  Memory space(workspace);
  x.Fill(random);
  w.Fill(random);
  y.Fill(random);
  bias.Fill(random);
  Array& read = forward ? x : y;
  if (c.infinite) read.Put(random->Below(read.size), INFINITY);
  Array& written = forward ? y : weights ? w : x;
  std::vector<double> want(written.size);
  const int64_t ins = c.in_channels / c.groups;
  const int64_t outs = c.out_channels / c.groups;
  const auto for_each = [](int64_t count, const auto& body) {
    for (int64_t i = 0; i < count; ++i) body(i);
  };
  for_each(c.batch, [&](int64_t n) {
    for_each(c.out_channels, [&](int64_t o) {
      for_each(c.Out(0) * c.Out(1), [&](int64_t s) {
        const int64_t row = s / c.Out(1), col = s % c.Out(1);
        const int64_t y_at = ElementAt(p.y, n, o, row, col);
        for_each(c.kernel[0] * c.kernel[1], [&](int64_t t) {
          const int64_t k = t / c.kernel[1], l = t % c.kernel[1];
          const int64_t i = row * c.stride[0] + k * c.dilation[0] - c.low[0];
          const int64_t j = col * c.stride[1] + l * c.dilation[1] - c.low[1];
          if (i < 0 || i >= c.in[0] || j < 0 || j >= c.in[1]) return;
          for_each(ins, [&](int64_t each) {
            const int64_t x_at = ElementAt(p.x, n, o / outs * ins + each, i, j);
            const int64_t w_at = ElementAt(p.w, o, each, k, l);
            if (forward) want[y_at] += x[x_at] * w[w_at];
            if (weights) want[w_at] += x[x_at] * y[y_at];
            if (!forward && !weights) want[x_at] += y[y_at] * w[w_at];
          });
        });
        if (forward && c.bias) want[y_at] += bias[o];
        if (forward && c.relu && want[y_at] < 0) want[y_at] = 0;
      });
    });
  });
  for (int64_t i = 0; i < written.size; ++i) written.Put(i, 99);
  const Status status = kernel(
      p,
      ConvBuffers{x.data(), w.data(), y.data(), c.bias ? bias.data() : nullptr,
                  space.data(), workspace},
      Threads(c.threads));
  bool ok = status.ok() && x.memory.Intact() && w.memory.Intact() &&
            y.memory.Intact() && bias.memory.Intact() && space.Intact();
  for (int64_t i = 0; i < written.size; ++i) {
    ok = ok && Close(written[i], Rounded(written.type, want[i]), 0);
  }
  Expect(ok, [&] { return c.Describe(); });
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_ARM_CONV_H_
