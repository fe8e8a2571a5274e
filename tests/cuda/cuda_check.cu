// SPDX-License-Identifier: Apache-2.0
//
// Every CUDA kernel family against the definition, on a real device and
// without Python, for compute-sanitizer:
//
//   cmake -S . -B build/check -DJAX_LAYOUT_CUDA=ON -DJAX_LAYOUT_CUDA_CHECK=ON
//   cmake --build build/check --target cuda_check
//   compute-sanitizer --tool racecheck build/check/cuda_check
//   build/check/cuda_check --huge     also more than 2^31 elements
//
// The exit code is the number of failed cases, 100 at most.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/permute/plan.h"
#include "cuda/permute/permute.h"

namespace {

using jax_layout::ChoosePermuteKernel;
using jax_layout::MakePermutePlan;
using jax_layout::Permute;
using jax_layout::PermutePlan;
using jax_layout::Status;

constexpr int kPoison = 0xCB;
constexpr int64_t kGuard = 256;

struct Case {
  std::vector<int64_t> shape, axes;
};

const Case kCases[] = {
    // Copies.
    {{1000003}, {0}},
    // Rows.
    {{5, 37, 160}, {1, 0, 2}},
    {{3, 50, 7, 67}, {2, 1, 0, 3}},
    {{2, 3, 70000}, {1, 0, 2}},
    {{4, 128, 16, 64}, {0, 2, 1, 3}},
    // Tiles, whole and partial, vectors and single elements.
    {{256, 384}, {1, 0}},
    {{2, 516, 772}, {0, 2, 1}},
    {{2, 258, 514}, {0, 2, 1}},
    {{3, 257, 259}, {0, 2, 1}},
    {{64, 5, 96}, {2, 1, 0}},
    // Boxes: tiny axes, odd chunks, reversals.
    {{300000, 3}, {1, 0}},
    {{7, 3, 6000}, {0, 2, 1}},
    {{61, 53, 3}, {1, 0, 2}},
    {{37, 41, 2}, {1, 0, 2}},
    {{16, 16, 16, 16}, {3, 2, 1, 0}},
    {{5, 3, 2, 4, 5, 7, 3, 4}, {7, 6, 5, 4, 3, 2, 1, 0}},
    {{2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2},
     {17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}},
};

std::string Name(const Case& c, int64_t itemsize, int64_t x_offset,
                 int64_t y_offset) {
  std::string name = "permute of (";
  for (int64_t n : c.shape) name += std::to_string(n) + ", ";
  name += ") to axes (";
  for (int64_t n : c.axes) name += std::to_string(n) + ", ";
  return name + "), " + std::to_string(itemsize) + " bytes, offsets " +
         std::to_string(x_offset) + " and " + std::to_string(y_offset);
}

// The byte offset in x of the item at position `item` of y.
int64_t Source(const Case& c, int64_t item) {
  const int rank = static_cast<int>(c.shape.size());
  int64_t from = 0;
  for (int d = rank - 1; d >= 0; --d) {
    int64_t stride = 1;
    for (int e = static_cast<int>(c.axes[d]) + 1; e < rank; ++e) {
      stride *= c.shape[e];
    }
    from += item % c.shape[c.axes[d]] * stride;
    item /= c.shape[c.axes[d]];
  }
  return from;
}

// Checks at most this many items, evenly spread, of huge results.
constexpr int64_t kSamples = 1 << 20;

std::string Check(const Case& c, int64_t itemsize, int64_t x_offset,
                  int64_t y_offset) {
  PermutePlan plan;
  const Status status = MakePermutePlan(c.shape, c.axes, itemsize, &plan);
  if (!status.ok()) return status.message;
  const int64_t size = plan.size;
  const int64_t bytes = size + 2 * kGuard;
  std::vector<unsigned char> x(static_cast<size_t>(size)),
      y(static_cast<size_t>(bytes));
  uint32_t random = 1;
  for (unsigned char& b : x) {
    random = random * 1664525u + 1013904223u;
    b = static_cast<unsigned char>(random >> 24);
  }

  char *device_x = nullptr, *device_y = nullptr;
  cudaStream_t stream = nullptr;
  // Exact sizes, so that memcheck sees one byte too many.
  cudaError_t error = cudaStreamCreate(&stream);
  if (!error) error = cudaMalloc(&device_x, size + x_offset);
  if (!error) error = cudaMalloc(&device_y, bytes + y_offset);
  if (!error) {
    error =
        cudaMemcpy(device_x + x_offset, x.data(), size, cudaMemcpyHostToDevice);
  }
  if (!error) error = cudaMemset(device_y, kPoison, bytes + y_offset);
  if (!error) error = cudaDeviceSynchronize();
  std::string wrong;
  if (!error) {
    wrong = Permute(ChoosePermuteKernel(plan), device_x + x_offset,
                    device_y + y_offset + kGuard, stream)
                .message;
    error = cudaStreamSynchronize(stream);
  }
  if (!error) {
    error = cudaMemcpy(y.data(), device_y + y_offset, bytes,
                       cudaMemcpyDeviceToHost);
  }
  cudaFree(device_x);
  cudaFree(device_y);
  if (stream != nullptr) cudaStreamDestroy(stream);
  if (error) return cudaGetErrorString(error);
  if (!wrong.empty()) return wrong;

  for (int64_t b = 0; b < kGuard; ++b) {
    if (y[b] != kPoison || y[bytes - 1 - b] != kPoison) return "guard written";
  }
  const int64_t items = size / itemsize;
  const int64_t step = std::max<int64_t>(1, items / kSamples);
  for (int64_t item = 0; item < items; item += step) {
    if (std::memcmp(&y[kGuard + item * itemsize],
                    &x[Source(c, item) * itemsize], itemsize) != 0) {
      return "wrong item at " + std::to_string(item);
    }
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "cuda_check: no CUDA device\n");
    return 100;
  }
  int cases = 0, failed = 0;
  const auto run = [&](const Case& c, int64_t itemsize, int64_t x_offset,
                       int64_t y_offset) {
    ++cases;
    const std::string wrong = Check(c, itemsize, x_offset, y_offset);
    if (wrong.empty()) return;
    ++failed;
    std::fprintf(stderr, "%s: %s\n",
                 Name(c, itemsize, x_offset, y_offset).c_str(), wrong.c_str());
  };
  for (const Case& c : kCases) {
    for (int64_t itemsize : {1, 2, 4, 8, 16}) {
      const int64_t step = std::min<int64_t>(itemsize, 8);
      run(c, itemsize, 0, 0);
      run(c, itemsize, step, 0);
      run(c, itemsize, 0, step);
    }
  }
  if (argc > 1 && std::strcmp(argv[1], "--huge") == 0) {
    run({{47000, 47000}, {1, 0}}, 1, 0, 0);        // tiles, 2.2e9 elements
    run({{3, 750000000}, {1, 0}}, 1, 0, 0);        // boxes
    run({{700000, 3, 1100}, {1, 0, 2}}, 1, 1, 1);  // rows of single bytes
  }
  std::printf("cuda_check: %d of %d cases failed\n", failed, cases);
  return std::min(failed, 100);
}
