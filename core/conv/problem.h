// SPDX-License-Identifier: Apache-2.0
//
// What a backend's convolution is asked to do, and the memory it does it with.
#ifndef JAX_LAYOUT_CORE_CONV_PROBLEM_H_
#define JAX_LAYOUT_CORE_CONV_PROBLEM_H_

#include <array>
#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace jax_layout {

// With i = s * stride + t * dilation - pad_low, per spatial axis,
//
//   kForward     y[n, o, s]  = sum over c, t of x[n, c, i] * w[o, c, t]
//   kInputGrad   x[n, c, i]  = sum over o, s, t of y[n, o, s] * w[o, c, t]
//   kWeightGrad  w[o, c, t]  = sum over n, s of x[n, c, i] * y[n, o, s]
//
// The array on the left is written, the other two are read. kInputGrad is also
// the transposed convolution.
enum class ConvPass { kForward, kInputGrad, kWeightGrad };

// Where the elements of an array lie, in elements: a convolution reads and
// writes any order of the axes. `block` > 1: channels lie in blocks of so many,
// innermost, and strides[1] is the step from block to block.
struct ConvLayout {
  // x and y: n, c, then the spatial axes; w: o, c, then the spatial axes.
  std::array<int64_t, 5> strides = {};
  int64_t block = 1;
};

// One and two spatial axes stand as the last of three; the others have size 1.
struct ConvProblem {
  ConvPass pass = ConvPass::kForward;
  DType type = DType::kF32;    // of what is read
  DType result = DType::kF32;  // of what is written
  int64_t batch = 1;
  int64_t groups = 1;
  int64_t in_channels = 1;                // of x, all groups together
  int64_t out_channels = 1;               // of y; w has in_channels / groups
  std::array<int64_t, 3> in = {1, 1, 1};  // spatial sizes of x
  std::array<int64_t, 3> kernel = {1, 1, 1};  // of w
  std::array<int64_t, 3> out = {1, 1, 1};     // of y
  std::array<int64_t, 3> stride = {1, 1, 1};
  std::array<int64_t, 3> dilation = {1, 1, 1};  // 1: taps side by side
  std::array<int64_t, 3> pad_low = {0, 0, 0};   // negative: x is cropped
  std::array<int64_t, 3> pad_high = {0, 0, 0};
  ConvLayout x, w, y;
  // kForward: the order in which w lies, if it is the kernel's own, a name such
  // as "OHWI64o"; w.strides are then row-major.
  std::string w_format;
  // Not kWeightGrad: products may be saved by transforms, which round otherwise
  // than the plain sum.
  bool winograd = false;
  bool bias = false;  // kForward: [out_channels], dtype of y, added to y
  bool relu = false;  // kForward: after the bias
};

struct ConvBuffers {
  void* x = nullptr;
  void* w = nullptr;
  void* y = nullptr;
  const void* bias = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_CONV_PROBLEM_H_
