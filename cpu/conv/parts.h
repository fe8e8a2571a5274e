// SPDX-License-Identifier: Apache-2.0
//
// A convolution as tasks: parts that are convolutions of their own.
#ifndef JAX_LAYOUT_CPU_CONV_PARTS_H_
#define JAX_LAYOUT_CPU_CONV_PARTS_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/conv/problem.h"

namespace jax_layout {

inline int64_t ConvProduct(const std::array<int64_t, 3>& a) {
  return a[0] * a[1] * a[2];
}

// A part of a problem, with the same strides.
struct ConvPart {
  ConvProblem problem;
  int64_t x = 0, w = 0, y = 0, bias = 0;  // where it begins, in elements
};

inline int64_t ChannelOffset(const ConvLayout& layout, int64_t channel) {
  return channel / layout.block * layout.strides[1] + channel % layout.block;
}

inline void CutBatch(int64_t first, int64_t count, ConvPart* part) {
  part->x += first * part->problem.x.strides[0];
  part->y += first * part->problem.y.strides[0];
  part->problem.batch = count;
}

// Channels of the result: of x for kInputGrad, else of y. Of several groups,
// whole ones.
inline void CutChannels(int64_t first, int64_t count, ConvPart* part) {
  ConvProblem& p = part->problem;
  int64_t in = 0, out = 0;  // the first channels of x and y
  if (p.groups > 1) {
    const int64_t ins = p.in_channels / p.groups;
    const int64_t outs = p.out_channels / p.groups;
    const int64_t each = p.pass == ConvPass::kInputGrad ? ins : outs;
    in = first / each * ins;
    out = first / each * outs;
    part->w += out * p.w.strides[0];
    p.groups = count / each;
    p.in_channels = p.groups * ins;
    p.out_channels = p.groups * outs;
  } else if (p.pass == ConvPass::kInputGrad) {
    in = first;
    part->w += first * p.w.strides[1];
    p.in_channels = count;
  } else {
    out = first;
    part->w += first * p.w.strides[0];
    p.out_channels = count;
  }
  part->x += ChannelOffset(p.x, in);
  part->y += ChannelOffset(p.y, out);
  part->bias += out;
}

// Rows of the result, of y for kWeightGrad: positions along a spatial axis.
// Returns false where this part is no convolution, all in the padding.
inline bool CutRows(int axis, int64_t first, int64_t count, ConvPart* part) {
  ConvProblem& p = part->problem;
  const int64_t stride = p.stride[axis];
  const int64_t reach = (p.kernel[axis] - 1) * p.dilation[axis] + 1;
  int64_t& low = p.pad_low[axis];
  int64_t& high = p.pad_high[axis];
  if (p.pass != ConvPass::kInputGrad) {
    const int64_t begin = first * stride - low;
    const int64_t end = (first + count - 1) * stride - low + reach;
    const int64_t from = std::max<int64_t>(begin, 0);
    const int64_t to = std::min(end, p.in[axis]);
    if (from >= to) return false;
    low = from - begin;
    high = end - to;
    p.in[axis] = to - from;
    p.out[axis] = count;
    part->x += from * p.x.strides[2 + axis];
    part->y += first * p.y.strides[2 + axis];
    return true;
  }
  // The rows of y that reach [first, first + count) of x.
  const int64_t lowest = first + low - (reach - 1);
  int64_t from = lowest <= 0 ? 0 : CeilDiv(lowest, stride);
  // Rows before those may be read too, which reach only the padding.
  if (from * stride > first + low) from = (first + low) / stride;
  const int64_t to =
      std::min((first + count - 1 + low) / stride + 1, p.out[axis]);
  if (from >= to) return false;
  low = first + low - from * stride;
  high = (to - from - 1) * stride + reach - count - low;
  // Less than a stride of x may lie behind the last row's reach.
  if (high < 0) high = std::min<int64_t>(0, high + stride - 1);
  if (high < 0) return false;
  p.in[axis] = count;
  p.out[axis] = to - from;
  part->x += first * p.x.strides[2 + axis];
  part->y += from * p.y.strides[2 + axis];
  return true;
}

// How a problem is cut: so many images, rows and channels to a part.
struct ConvTiling {
  int64_t images = 1, rows = 1, channels = 1;
  int axis = 0;  // whose positions are rows
  int64_t all_images = 1, all_rows = 1, all_channels = 1;

  int64_t Count() const {
    return CeilDiv(all_images, images) * CeilDiv(all_rows, rows) *
           CeilDiv(all_channels, channels);
  }
  // Part i of Count(). Those of the same channels follow each other.
  bool Cut(int64_t i, ConvPart* part) const {
    const int64_t row = i % CeilDiv(all_rows, rows) * rows;
    i /= CeilDiv(all_rows, rows);
    const int64_t image = i % CeilDiv(all_images, images) * images;
    i /= CeilDiv(all_images, images);
    const int64_t channel = i * channels;
    CutBatch(image, std::min(images, all_images - image), part);
    if (channels < all_channels) {
      CutChannels(channel, std::min(channels, all_channels - channel), part);
    }
    return rows == all_rows ||
           CutRows(axis, row, std::min(rows, all_rows - row), part);
  }
};

// The whole as one part.
inline ConvTiling WholeConv(const ConvProblem& p) {
  ConvTiling t;
  // The outermost axis that there is.
  while (t.axis < 2 && p.in[t.axis] == 1 && p.out[t.axis] == 1 &&
         p.kernel[t.axis] == 1) {
    ++t.axis;
  }
  const bool to_x = p.pass == ConvPass::kInputGrad;
  t.images = t.all_images = p.batch;
  t.rows = t.all_rows = to_x ? p.in[t.axis] : p.out[t.axis];
  t.channels = t.all_channels = to_x ? p.in_channels : p.out_channels;
  return t;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_PARTS_H_
