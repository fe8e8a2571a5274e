// SPDX-License-Identifier: Apache-2.0
//
// Running emulated kernels and hearing what they did wrong.
#ifndef JAX_LAYOUT_TESTS_CUDA_EMULATION_EMULATION_H_
#define JAX_LAYOUT_TESTS_CUDA_EMULATION_EMULATION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"

namespace emulation {

// The order in which runnable threads of a block proceed: a kernel whose
// result depends on it lacks a barrier.
struct Order {
  enum Kind { kForward, kReversed, kShuffled } kind = kForward;
  uint64_t seed = 0;
};

// What global memory is for the next launches. Without `load` and `store` the
// addresses are real; with them nothing is dereferenced, so x and y may be
// larger than any memory.
struct Memory {
  const char* x = nullptr;
  char* y = nullptr;
  int64_t size = 0;
  std::function<void(int64_t offset, char* to, size_t bytes)> load;
  std::function<void(int64_t offset, const char* from, size_t bytes)> store;
  // What may be read, of real addresses, where that is not x alone.
  std::vector<std::pair<const void*, int64_t>> reads = {};
};

// Which blocks of a grid run: all, or the first, the last and random ones, as
// many as `count`. A kernel whose blocks stride by gridDim is sampled by its
// items: `grid` stands in for the number of blocks.
struct Sample {
  int count = 0;
  int64_t grid = 0;
};

// Sets the state of the next launches.
void Configure(Order order, Memory memory, Sample sample = {});

// What went wrong first, or nothing.
const std::string& Error();
void Fail(const std::string& message);

}  // namespace emulation

#endif  // JAX_LAYOUT_TESTS_CUDA_EMULATION_EMULATION_H_
