// SPDX-License-Identifier: Apache-2.0
//
// The index kernels, for tests/cuda/test_cuda_emulation.py; every function
// returns an empty string, or what went wrong.
#include <string>

#include "cuda/index/index.h"
#include "emulation.h"

namespace {

using jax_layout::IndexPlan;
using jax_layout::Status;

std::string result;

const char* Run(const Status& status) {
  result = status.ok() ? emulation::Error() : status.message;
  return result.c_str();
}

struct View {
  IndexPlan plan;
  int64_t whole, selected, indices;  // bytes
};

// dims: batch, outer, extent, count, inner, itemsize, wide, clip, wrap.
View ToView(const int64_t* dims) {
  View v;
  IndexPlan& p = v.plan;
  p.batch = dims[0];
  p.outer = dims[1];
  p.extent = dims[2];
  p.count = dims[3];
  p.inner = dims[4];
  p.itemsize = dims[5];
  p.wide = dims[6] != 0;
  p.clip = dims[7] != 0;
  p.wrap = dims[8] != 0;
  const int64_t slice = p.batch * p.outer * p.inner_bytes();
  v.whole = slice * p.extent;
  v.selected = slice * p.count;
  v.indices = p.batch * p.count * (p.wide ? 8 : 4);
  return v;
}

emulation::Order ToOrder(int order) {
  if (order == 0) return {emulation::Order::kForward};
  if (order == 1) return {emulation::Order::kReversed};
  return {emulation::Order::kShuffled, static_cast<uint64_t>(order)};
}

emulation::Memory ToMemory(void* y, int64_t size,
                           std::vector<std::pair<const void*, int64_t>> reads) {
  return {.x = nullptr,
          .y = static_cast<char*>(y),
          .size = size,
          .load = {},
          .store = {},
          .reads = std::move(reads)};
}

}  // namespace

extern "C" {

const char* index_select(const void* x, const void* index, const void* fill,
                         void* y, const int64_t* dims, int order) {
  const View v = ToView(dims);
  emulation::Configure(
      ToOrder(order),
      ToMemory(y, v.selected, {{x, v.whole}, {index, v.indices}}));
  return Run(jax_layout::IndexSelect(
      v.plan, x, index, static_cast<const uint8_t*>(fill), y, nullptr));
}

// `places` is null for the atomic kernel; y holds what is added to.
const char* index_add(const void* index, const int32_t* places,
                      const void* source, void* y, int type,
                      const int64_t* dims, int order) {
  const View v = ToView(dims);
  emulation::Configure(ToOrder(order),
                       ToMemory(y, v.whole,
                                {{source, v.selected},
                                 {index, v.indices},
                                 {places, v.plan.batch * v.plan.count * 4},
                                 {y, v.whole}}));
  return Run(jax_layout::IndexAdd(v.plan,
                                  static_cast<jax_layout::SumType>(type), index,
                                  places, source, y, y, nullptr));
}

}  // extern "C"
