// SPDX-License-Identifier: Apache-2.0
#include "cpu/permute.h"

#include <cstring>

namespace jax_layout {

PermuteKernel ChoosePermuteKernel(const PermutePlan& plan) { return {plan}; }

Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               const Executor& executor) {
  const PermutePlan& plan = kernel.plan;
  const char* src = static_cast<const char*>(x);
  char* dst = static_cast<char*>(y);
  int64_t index[kMaxRank] = {};
  int64_t offset = 0;
  for (int64_t done = 0; done < plan.size; done += plan.chunk) {
    std::memcpy(dst + done, src + offset * plan.chunk, plan.chunk);
    for (int d = plan.rank - 1; d >= 0; --d) {
      offset += plan.dims[d].x_stride;
      if (++index[d] < plan.dims[d].extent) break;
      offset -= plan.dims[d].x_stride * plan.dims[d].extent;
      index[d] = 0;
    }
  }
  return Status::Ok();
}

}  // namespace jax_layout
