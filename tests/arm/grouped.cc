// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/grouped/grouped.h"

#include "cpu/isa.h"
#include "tests/arm/conv.h"

namespace jax_layout {
namespace {

Random random;

// Whether there is a kernel.
bool Check(ConvCase c) {
  if (!c.Valid()) return false;
  const ConvProblem p = c.Problem();
  if (!GroupedSupports(p, BestIsa())) return false;
  CheckConv(c, GroupedWorkspace(p, c.threads, BestIsa()), &random,
            [](const auto&... all) { return Grouped(all..., BestIsa()); });
  return true;
}

}  // namespace

void CheckGrouped() {
  int64_t served = 0;
  for (ConvPass pass : {ConvPass::kForward, ConvPass::kInputGrad}) {
    for (Order order : {Order::kLast, Order::kPlanes}) {
      ConvCase c;
      c.pass = pass;
      c.order = order;
      c.kernel = {3, 3};
      c.low = c.high = {1, 1};
      c.in = {23, 37};
      // Whole vectors of channels at every level.
      for (int64_t groups : {2, 3}) {
        c.groups = groups;
        c.in_channels = c.out_channels = 16 * groups;
        Expect(Check(c), [&] { return "serves " + c.Describe(); });
      }
      // Two groups in one.
      c.groups = 6;
      c.in_channels = c.out_channels = 12;
      Expect(Check(c) == (BestIsa() == Isa::kNeon),
             [&] { return "serves " + c.Describe(); });
      for (int i = 0; i < 120; ++i) {
        c.groups = random.Of<int64_t>({2, 3, 4, 8});
        c.in_channels = c.groups * random.Of<int64_t>({1, 2, 3, 4, 8, 16});
        c.out_channels = c.groups * random.Of<int64_t>({2, 4, 8, 12, 16});
        c.taps_first = random.Flip();
        c.batch = random.Between(1, 2);
        for (int d : {0, 1}) {
          c.in[d] = random.Between(1, 29);
          c.kernel[d] = random.Of<int64_t>({1, 2, 3, 3, 5});
          c.stride[d] = random.Of<int64_t>({1, 1, 2, 3});
          c.dilation[d] = random.Of<int64_t>({1, 1, 2});
          c.low[d] = random.Between(-1, c.kernel[d]);
          c.high[d] = random.Between(-1, c.kernel[d]);
        }
        c.bias = pass == ConvPass::kForward && random.Flip();
        c.relu = pass == ConvPass::kForward && random.Flip();
        c.threads = static_cast<int>(random.Between(1, 3));
        served += Check(c);
      }
    }
  }
  Expect(served > 60, [&] { return Text("serves", served); });
}

}  // namespace jax_layout
