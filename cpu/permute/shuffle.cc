// SPDX-License-Identifier: Apache-2.0
#include "cpu/permute/shuffle.h"

#include <algorithm>
#include <cstring>

namespace jax_layout {
namespace {

// Bytes that a program covers; its windows are several times as much.
constexpr int64_t kMaxBytes = 4096;

// Bytes that are contiguous when take[d] of each dim are covered.
int64_t RunBytes(const PermutePlan& plan, const std::vector<int>& order,
                 const std::vector<int64_t>& take) {
  int64_t bytes = plan.chunk;
  for (int d : order) {
    bytes *= take[d];
    if (take[d] < plan.dims[d].extent) break;
  }
  return bytes;
}

}  // namespace

bool ShuffleExtents(const PermutePlan& plan, const std::vector<int>& y_order,
                    const std::vector<int>& x_order, int64_t vector_bytes,
                    std::vector<int64_t>* take, int* split) {
  if (vector_bytes == 0 || plan.chunk > vector_bytes / 2) return false;
  take->assign(plan.rank, 1);
  for (const std::vector<int>* order : {&y_order, &x_order}) {
    int64_t bytes = plan.chunk;
    for (int d : *order) {
      if (bytes >= vector_bytes) break;
      (*take)[d] = plan.dims[d].extent;
      bytes *= plan.dims[d].extent;
    }
  }
  *split = static_cast<int>(std::max_element(take->begin(), take->end()) -
                            take->begin());
  int64_t others = plan.chunk;
  for (int d = 0; d < plan.rank; ++d) {
    if (d == *split) continue;
    if ((*take)[d] > kMaxBytes) return false;
    others *= (*take)[d];
    if (others > kMaxBytes) return false;
  }
  int64_t& steps = (*take)[*split];
  // A power of two, so that the next block starts on a vector as well.
  while (others * steps > kMaxBytes) steps = steps > 64 ? 64 : (steps + 1) / 2;
  return true;
}

ShuffleProgram MakeShuffleProgram(const PermutePlan& plan,
                                  const std::vector<int>& y_order,
                                  const std::vector<int>& x_order,
                                  const std::vector<int64_t>& take,
                                  int64_t vector_bytes) {
  // Chunks in the order of y: their places on both sides.
  struct Place {
    int64_t y, x, run;  // bytes; run: where the contiguous run in x begins
  };
  const int64_t x_run = RunBytes(plan, x_order, take);
  const int64_t y_run = RunBytes(plan, y_order, take);
  std::vector<Place> places = {{0, 0, 0}};
  for (int d : y_order) {
    // Within a run of x, an axis moves the place but not the run's start.
    bool in_run = false;
    for (int e : x_order) {
      if (e == d) in_run = true;
      if (e == d || take[e] < plan.dims[e].extent) break;
    }
    const size_t inner = places.size();
    for (int64_t i = 1; i < take[d]; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        Place place = places[j];
        place.y += i * plan.dims[d].y_stride * plan.chunk;
        place.x += i * plan.dims[d].x_stride * plan.chunk;
        if (!in_run) place.run += i * plan.dims[d].x_stride * plan.chunk;
        places.push_back(place);
      }
    }
  }

  ShuffleProgram program;
  const int64_t run_chunks = y_run / plan.chunk;
  const int64_t num_places = static_cast<int64_t>(places.size());
  struct Byte {
    int64_t x, run;
    int k;
  };
  for (int64_t first = 0; first < num_places; first += run_chunks) {
    for (int64_t begin = 0; begin < y_run; begin += vector_bytes) {
      const int64_t bytes = std::min(vector_bytes, y_run - begin);
      std::vector<Byte> todo;
      for (int k = 0; k < bytes; ++k) {
        const Place& place = places[first + (begin + k) / plan.chunk];
        todo.push_back({place.x + (begin + k) % plan.chunk, place.run, k});
      }
      std::stable_sort(todo.begin(), todo.end(),
                       [](const Byte& a, const Byte& b) { return a.x < b.x; });
      program.outputs.push_back({places[first].y + begin, bytes, 0});
      program.whole &= bytes == vector_bytes;
      for (size_t next = 0; next < todo.size();) {
        // The window stays inside its run of x: nothing else may be read.
        const int64_t run = todo[next].run;
        const int64_t length = std::min(vector_bytes, x_run);
        ShuffleProgram::Window window;
        std::memset(window.index, 0, sizeof(window.index));
        window.bytes = length;
        window.x_offset = std::min(todo[next].x, run + x_run - length);
        while (next < todo.size() && todo[next].run == run &&
               todo[next].x < window.x_offset + length) {
          const Byte& byte = todo[next++];
          window.index[byte.k] =
              static_cast<uint8_t>(0x80 | (byte.x - window.x_offset));
        }
        program.whole &= length == vector_bytes;
        program.windows.push_back(window);
        ++program.outputs.back().num_windows;
      }
    }
  }
  std::vector<int64_t> runs;
  for (const Place& place : places) runs.push_back(place.run);
  std::sort(runs.begin(), runs.end());
  runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
  for (int64_t run : runs) {
    for (int64_t at = 0; at < x_run; at += 64)
      program.lines.push_back(run + at);
  }
  return program;
}

}  // namespace jax_layout
