// SPDX-License-Identifier: Apache-2.0
//
// Reads memory once: the ceiling of what reads a large operand and writes
// little.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "benchmarks/native/thread_pool.h"

namespace jax_layout {
namespace {

constexpr int64_t kPage = 4096 / sizeof(uint64_t);

// The sum of `size` words, read from `streams` consecutive pages in turn.
uint64_t Sum(const uint64_t* x, int64_t size, int64_t streams) {
  constexpr int kLanes = 32;  // four registers of 512 bits
  uint64_t lanes[kLanes] = {};
  const int64_t group = streams * kPage;
  int64_t done = 0;
  for (; done + group <= size; done += group) {
    for (int64_t at = 0; at < kPage; at += kLanes) {
      for (int64_t s = 0; s < group; s += kPage) {
        const uint64_t* from = x + done + s + at;
        for (int i = 0; i < kLanes; ++i) lanes[i] += from[i];
      }
    }
  }
  for (; done < size; ++done) lanes[0] += x[done];
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

// The sum, modulo 2^64, of so many words.
extern "C" uint64_t jax_layout_sweep(const uint64_t* x, int64_t size,
                                     int threads, int64_t streams) {
  const int64_t pieces = threads == 1 ? 1 : 8 * threads;
  const int64_t unit = streams * kPage;
  const int64_t piece = std::max<int64_t>(1, size / pieces / unit) * unit;
  std::atomic<uint64_t> sum = 0;
  ThreadPool::OfSize(threads).ParallelFor(
      (size + piece - 1) / piece, [&](int64_t i) {
        sum += Sum(x + i * piece, std::min(piece, size - i * piece), streams);
      });
  return sum;
}

}  // namespace jax_layout
