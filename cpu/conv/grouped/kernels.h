// SPDX-License-Identifier: Apache-2.0
//
// Convolutions in groups of a few channels each, written once over a vector
// type (see gemm_epilogue.h) and included by one source file per instruction
// set. Beyond what is said there, a vector type V here offers
//
//   kMost              sums that fit in the registers, with three filters
//   kMembers           1, 2 or 4: most floats that Repeat() takes
//   Repeat<n>(p)       n floats over and over, at the price of a load
//   Permute(v, order)  lane i is lane order[i] of v
//
// The lanes are output channels. Where a group has fewer, several groups share
// a vector, their channels interleaved: lane i * members + g is channel i of
// group g. Input channels are staged likewise, so that what an input channel
// gives to all lanes is one Repeat<members>().
#ifndef JAX_LAYOUT_CPU_CONV_GROUPED_KERNELS_H_
#define JAX_LAYOUT_CPU_CONV_GROUPED_KERNELS_H_

#include <cstdint>

#include "cpu/conv/depthwise/kernels.h"

namespace jax_layout {

// Pixels whose channels are contiguous, to be staged. Strides count floats.
struct GroupedStage {
  const float* in;
  int64_t in_step;  // from pixel to pixel
  float* out;
  int64_t out_step;
  int64_t count;         // of pixels
  int64_t channels;      // of a pixel
  const int32_t* order;  // in which the channels go out, or none
};

// A row of results.
struct GroupedRow {
  const float* in;         // what the first tap of the first result reads
  int64_t in_row, in_col;  // from tap to tap
  int64_t in_step;         // from result to result
  const float* w;          // [tap row][input channel][tap column][lane]
  const float* bias;       // [lane]
  float* out;
  int64_t out_step;
  int64_t count;  // of results
  int64_t tap_rows, channels, tap_cols;
  int64_t members;
  const int32_t* order;  // in which the lanes go out, if there are members
  bool relu;
};

struct GroupedKernels {
  int64_t lanes, members;  // kLanes, kMembers
  void (*stage)(const GroupedStage&);
  void (*row)(const GroupedRow&);
};

extern const GroupedKernels kGroupedPortable;
#ifdef __x86_64__
extern const GroupedKernels kGroupedAvx512, kGroupedAvx2;
#elif defined(__aarch64__)
extern const GroupedKernels kGroupedNeon;
#endif

namespace {

// With kWidth taps in a row, as far apart as the results are, what is read
// serves all the results that have a tap for it. kStep is from result to
// result, 0 if not known before.
template <class V, int kCount, int kMembers, int kWidth, int kStep>
void GroupedResults(const GroupedRow& b, const float* x, float* y) {
  using Reg = typename V::Reg;
  const int64_t step = kStep > 0 ? kStep : b.in_step;
  Reg sum[kCount];
  const Reg bias = V::Load(b.bias);
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sum[i] = bias;
  const float* w = b.w;
  for (int64_t k = 0; k < b.tap_rows; ++k) {
    const float* p = x + k * b.in_row;
    for (int64_t c = 0; c < b.channels; ++c, p += kMembers) {
      if constexpr (kWidth > 0) {
        Reg factor[kWidth];
#pragma GCC unroll 4
        for (int l = 0; l < kWidth; ++l, w += V::kLanes) {
          factor[l] = V::Load(w);
        }
#pragma GCC unroll 20
        for (int j = 0; j < kCount + kWidth - 1; ++j) {
          const Reg v = V::template Repeat<kMembers>(p + j * step);
#pragma GCC unroll 4
          for (int l = 0; l < kWidth; ++l) {
            if (0 <= j - l && j - l < kCount) {
              sum[j - l] = sum[j - l] + factor[l] * v;
            }
          }
        }
        continue;
      }
      const float* q = p;
      for (int64_t l = 0; l < b.tap_cols; ++l, q += b.in_col, w += V::kLanes) {
        const Reg factor = V::Load(w);
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) {
          sum[i] = sum[i] + factor * V::template Repeat<kMembers>(q + i * step);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    Reg z = b.relu ? V::Max(V::Zero(), sum[i]) : sum[i];
    if constexpr (kMembers > 1) z = V::Permute(z, b.order);
    V::Store(y + i * b.out_step, z);
  }
}

template <class V, int kMost, int kWidth, int kStep>
void GroupedPieces(const GroupedRow& b) {
  // Nearly even pieces: the sums of a small one wait for each other.
  const int64_t pieces = (b.count + kMost - 1) / kMost;
  const int64_t most = (b.count + pieces - 1) / pieces;
  for (int64_t q = 0; q < b.count; q += most) {
    const float* x = b.in + q * b.in_step;
    float* y = b.out + q * b.out_step;
    WithCount<kMost>(Least(most, b.count - q), [&]<int kCount>() {
      if constexpr (V::kMembers >= 4) {
        if (b.members == 4) {
          return GroupedResults<V, kCount, 4, kWidth, kStep>(b, x, y);
        }
      }
      if constexpr (V::kMembers >= 2) {
        if (b.members == 2) {
          return GroupedResults<V, kCount, 2, kWidth, kStep>(b, x, y);
        }
      }
      GroupedResults<V, kCount, 1, kWidth, kStep>(b, x, y);
    });
  }
}

template <class V>
void GroupedRowOf(const GroupedRow& b) {
  constexpr int kMost = V::kMost, kLanes = V::kLanes;
  // Known distances are part of the instructions.
  if (b.in_step == kLanes) {
    return b.tap_cols == 3 && b.in_col == kLanes
               ? GroupedPieces<V, kMost, 3, kLanes>(b)
               : GroupedPieces<V, kMost, 0, kLanes>(b);
  }
  if (b.in_step == 2 * kLanes) {
    return GroupedPieces<V, kMost, 0, 2 * kLanes>(b);
  }
  GroupedPieces<V, 4, 0, 0>(b);
}

template <class V>
void GroupedStageOf(const GroupedStage& s) {
  for (int64_t i = 0; i < s.count; ++i) {
    const float* x = s.in + i * s.in_step;
    float* y = s.out + i * s.out_step;
    for (int64_t c = 0; c < s.channels; c += V::kLanes) {
      const int n = static_cast<int>(Least(V::kLanes, s.channels - c));
      const typename V::Reg v = V::Load(x + c, n);
      V::Store(y + c, s.order != nullptr ? V::Permute(v, s.order) : v);
    }
  }
}

template <class V>
constexpr GroupedKernels GroupedKernelsOf() {
  return {V::kLanes, V::kMembers, GroupedStageOf<V>, GroupedRowOf<V>};
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_GROUPED_KERNELS_H_
