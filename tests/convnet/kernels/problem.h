// SPDX-License-Identifier: Apache-2.0
//
// A ConvProblem as Python's ctypes passes it.
#ifndef JAX_LAYOUT_TESTS_CONV_KERNELS_PROBLEM_H_
#define JAX_LAYOUT_TESTS_CONV_KERNELS_PROBLEM_H_

#include <algorithm>
#include <cstdint>

#include "core/conv/problem.h"

namespace jax_layout {

// As tests/convnet/test_conv_depthwise.py declares it.
struct Problem {
  int64_t pass, type, result, batch, groups, in_channels, out_channels;
  int64_t in[3], kernel[3], out[3], stride[3], dilation[3];
  int64_t pad_low[3], pad_high[3];
  int64_t strides[3][5], blocks[3];  // of x, w, y
  int64_t bias, relu, winograd;
};

inline ConvProblem ToConv(const Problem& p) {
  ConvProblem c;
  c.pass = static_cast<ConvPass>(p.pass);
  c.type = static_cast<DType>(p.type);
  c.result = static_cast<DType>(p.result);
  c.batch = p.batch;
  c.groups = p.groups;
  c.in_channels = p.in_channels;
  c.out_channels = p.out_channels;
  auto copy = [](const int64_t* from, auto* to) {
    std::copy(from, from + to->size(), to->begin());
  };
  copy(p.in, &c.in);
  copy(p.kernel, &c.kernel);
  copy(p.out, &c.out);
  copy(p.stride, &c.stride);
  copy(p.dilation, &c.dilation);
  copy(p.pad_low, &c.pad_low);
  copy(p.pad_high, &c.pad_high);
  ConvLayout* const layouts[] = {&c.x, &c.w, &c.y};
  for (int i = 0; i < 3; ++i) {
    copy(p.strides[i], &layouts[i]->strides);
    layouts[i]->block = p.blocks[i];
  }
  c.bias = p.bias != 0;
  c.relu = p.relu != 0;
  c.winograd = p.winograd != 0;
  return c;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_CONV_KERNELS_PROBLEM_H_
