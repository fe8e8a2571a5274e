// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/depthwise/depthwise.h"

#include "cpu/isa.h"
#include "tests/arm/conv.h"

namespace jax_layout {
namespace {

Random random;

void Check(ConvCase c) {
  c.groups = c.out_channels = c.in_channels;
  if (!c.Valid()) return;
  const ConvProblem p = c.Problem();
  const bool served = DepthwiseSupports(p);
  // 16-bit elements take vectors that can be named.
  const bool expected = c.type == DType::kF32 || BestIsa() != Isa::kPortable;
  Expect(served == expected, [&] { return "serves " + c.Describe(); });
  if (!served || !expected) return;
  CheckConv(c, DepthwiseWorkspace(p, c.threads), &random,
            [](const auto&... all) { return Depthwise(all...); });
}

}  // namespace

void CheckDepthwise() {
  for (ConvPass pass :
       {ConvPass::kForward, ConvPass::kInputGrad, ConvPass::kWeightGrad}) {
    for (Order order : {Order::kLast, Order::kPlanes, Order::kBlocks}) {
      for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
        ConvCase c;
        c.pass = pass;
        c.order = order;
        c.type = c.result = type;
        c.kernel = {3, 3};
        c.low = c.high = {1, 1};
        for (int64_t stride : {1, 2}) {
          c.stride = {stride, stride};
          c.in_channels = 8;
          c.in = {37, 53};
          Check(c);
          c.in_channels = 40;
          c.in = {7, 14};
          c.batch = 3;
          Check(c);
          c.batch = 1;
        }
        c.result = DType::kF32;
        Check(c);
      }
    }
    for (int i = 0; i < 400; ++i) {
      ConvCase c;
      c.pass = pass;
      c.order = random.Of({Order::kLast, Order::kPlanes, Order::kBlocks});
      c.type = random.Of({DType::kF32, DType::kBF16, DType::kF16});
      c.result = random.Flip() ? c.type : DType::kF32;
      c.taps_first = random.Flip();
      c.batch = random.Between(1, 2);
      c.in_channels = c.order == Order::kBlocks
                          ? random.Of<int64_t>({8, 16})
                          : random.Of<int64_t>({1, 2, 3, 4, 5, 8, 17, 33});
      for (int d : {0, 1}) {
        c.in[d] = random.Between(1, 23);
        c.kernel[d] = random.Of<int64_t>({1, 2, 3, 3, 4, 5, 7});
        c.stride[d] = random.Of<int64_t>({1, 1, 2, 3});
        c.dilation[d] = random.Of<int64_t>({1, 1, 2, 3});
        c.low[d] = random.Between(-2, c.kernel[d] * c.dilation[d]);
        c.high[d] = random.Between(-2, c.kernel[d] * c.dilation[d]);
      }
      c.bias = pass == ConvPass::kForward && random.Flip();
      c.relu = pass == ConvPass::kForward && random.Flip();
      c.threads = static_cast<int>(random.Between(1, 3));
      Check(c);
    }
  }
}

}  // namespace jax_layout
