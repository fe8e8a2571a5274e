// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/winograd/winograd.h"

#include "cpu/isa.h"
#include "tests/arm/conv.h"

namespace jax_layout {
namespace {

Random random;

void Check(ConvCase c) {
  c.winograd = true;
  c.kernel = {3, 3};
  if (!c.Valid()) return;
  const ConvProblem p = c.Problem();
  const bool served = WinogradSupports(p, BestIsa());
  Expect(served == (BestIsa() != Isa::kPortable),
         [&] { return "serves " + c.Describe(); });
  if (!served) return;
  CheckConv(c, WinogradWorkspace(p, c.threads, BestIsa()), &random,
            [](const auto&... all) { return Winograd(all..., BestIsa()); });
}

}  // namespace

void CheckWinograd() {
  for (ConvPass pass : {ConvPass::kForward, ConvPass::kInputGrad}) {
    ConvCase c;
    c.pass = pass;
    c.in_channels = 32;
    c.out_channels = 64;
    for (int i = 0; i < 16; ++i) {
      for (int d : {0, 1}) {
        c.in[d] = random.Between(1, 13);
        c.low[d] = random.Between(0, 3);
        c.high[d] = random.Between(0, 3);
      }
      c.batch = random.Between(1, 2);
      c.taps_first = random.Flip();
      c.bias = pass == ConvPass::kForward && random.Flip();
      c.relu = pass == ConvPass::kForward && random.Flip();
      c.infinite = random.Flip();
      c.type = random.Of({DType::kF32, DType::kBF16, DType::kF16});
      c.result = random.Flip() ? c.type : DType::kF32;
      c.threads = static_cast<int>(random.Between(1, 3));
      Check(c);
    }
    // Several blocks.
    c.type = c.result = DType::kF32;
    c.in_channels = 96;
    c.out_channels = 32;
    c.in = {21, 22};
    c.low = c.high = {1, 1};
    c.batch = 2;
    Check(c);
  }
}

}  // namespace jax_layout
