// SPDX-License-Identifier: Apache-2.0
//
// Every CUDA kernel of permutes and rows by index against the definition, on a
// real device and without Python, for compute-sanitizer:
//
//   nvcc -std=c++20 -O3 -lineinfo -arch=native -I. -o cuda_check \
//     tests/cuda/cuda_check.cu cuda/permute/permute.cu cuda/index/index.cu
//   compute-sanitizer --tool racecheck cuda_check
//   cuda_check --huge           also more than 2^31 elements
//   cuda_check --at-most BYTES  leaves larger arrays out
//
// The exit code is the number of failed cases, 100 at most.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/index/plan.h"
#include "core/permute/plan.h"
#include "cuda/index/index.h"
#include "cuda/permute/permute.h"

namespace {

using jax_layout::ChoosePermuteKernel;
using jax_layout::IndexPlan;
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

// Bytes on the device that are given back.
class Device {
 public:
  explicit Device(const std::vector<unsigned char>& bytes)
      : size_(bytes.size()) {
    ok_ = cudaMalloc(&data_, size_) == cudaSuccess &&
          cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice) ==
              cudaSuccess;
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;

  bool ok() const { return ok_; }
  char* data() const { return static_cast<char*>(data_); }
  std::vector<unsigned char> Read() const {
    std::vector<unsigned char> bytes(size_);
    if (cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      bytes.clear();
    }
    return bytes;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
  bool ok_;
};

std::string Synchronized(const Status& status) {
  if (!status.ok()) return status.message;
  const cudaError_t error = cudaDeviceSynchronize();
  return error ? cudaGetErrorString(error) : "";
}

// Checks at most this many items, evenly spread, of huge results.
constexpr int64_t kSamples = 1 << 20;

std::string Check(const Case& c, int64_t itemsize, int64_t x_offset,
                  int64_t y_offset) {
  PermutePlan plan;
  const Status status = MakePermutePlan(c.shape, c.axes, itemsize, &plan);
  if (!status.ok()) return status.message;
  const int64_t size = plan.size;
  std::vector<unsigned char> x(static_cast<size_t>(x_offset + size));
  uint32_t random = 1;
  for (unsigned char& b : x) {
    random = random * 1664525u + 1013904223u;
    b = static_cast<unsigned char>(random >> 24);
  }
  std::vector<unsigned char> y(
      static_cast<size_t>(y_offset + size + 2 * kGuard), kPoison);
  // Exact sizes, so that memcheck sees one byte too many.
  const Device device_x(x), device_y(y);
  if (!device_x.ok() || !device_y.ok()) return "no memory";
  const int64_t first = y_offset + kGuard;  // of y's own bytes
  const std::string wrong = Synchronized(
      Permute(ChoosePermuteKernel(plan), device_x.data() + x_offset,
              device_y.data() + first, nullptr));
  if (!wrong.empty()) return wrong;
  y = device_y.Read();
  if (y.empty()) return "cannot read the device";

  const auto is_poison = [](unsigned char b) { return b == kPoison; };
  if (!std::all_of(y.begin(), y.begin() + first, is_poison) ||
      !std::all_of(y.end() - kGuard, y.end(), is_poison)) {
    return "guard written";
  }
  const int64_t items = size / itemsize;
  const int64_t step = std::max<int64_t>(1, items / kSamples);
  for (int64_t item = 0; item < items; item += step) {
    if (std::memcmp(&y[first + item * itemsize],
                    &x[x_offset + Source(c, item) * itemsize], itemsize) != 0) {
      return "wrong item at " + std::to_string(item);
    }
  }
  return "";
}

struct IndexCase {
  int64_t batch, outer, extent, count, inner, itemsize;
  int64_t rows;  // that indices fall on; a few beside them are out of range
  bool wide, clip;
};

const IndexCase kIndexCases[] = {
    {1, 1, 300, 517, 64, 4, 300, false, false},
    {1, 1, 300, 517, 64, 4, 7, true, false},  // many repeat
    {1, 3, 50, 41, 33, 4, 50, false, true},
    {4, 2, 20, 31, 5, 4, 20, true, true},
    {1, 1, 1000, 4000, 1, 4, 1000, false, false},
    {1, 5, 40, 64, 16, 2, 40, false, false},
    {1, 5, 40, 64, 7, 1, 40, false, false},
    {1, 2, 30, 16, 12, 8, 30, true, false},
    {1, 1, 3, 2000, 256, 4, 1, false, false},  // one row takes all
};

std::string Name(const IndexCase& c) {
  std::string name = c.wide ? "int64" : "int32";
  for (int64_t n : {c.batch, c.outer, c.extent, c.count, c.inner, c.itemsize}) {
    name += " " + std::to_string(n);
  }
  return name + (c.clip ? " clip" : "");
}

IndexPlan ToPlan(const IndexCase& c) {
  IndexPlan p;
  p.batch = c.batch;
  p.outer = c.outer;
  p.extent = c.extent;
  p.count = c.count;
  p.inner = c.inner;
  p.itemsize = c.itemsize;
  p.wide = c.wide;
  p.clip = c.clip;
  return p;
}

// Negative ones and some that name no row among them.
std::vector<int64_t> Indices(const IndexCase& c) {
  std::vector<int64_t> index(static_cast<size_t>(c.batch * c.count));
  uint32_t random = 7;
  for (int64_t& i : index) {
    random = random * 1664525u + 1013904223u;
    i = static_cast<int64_t>(random >> 16) % c.rows;
    if (random % 11 == 0) i -= c.extent;
    if (random % 29 == 0) i += 2 * c.extent;
  }
  return index;
}

std::vector<unsigned char> Stored(const std::vector<int64_t>& values,
                                  bool wide) {
  std::vector<unsigned char> bytes(values.size() * (wide ? 8 : 4));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<int32_t>(values[i]);
    if (wide) {
      std::memcpy(&bytes[8 * i], &values[i], 8);
    } else {
      std::memcpy(&bytes[4 * i], &narrow, 4);
    }
  }
  return bytes;
}

std::string CheckSelect(const IndexCase& c) {
  const IndexPlan plan = ToPlan(c);
  const int64_t row = plan.inner_bytes();
  const std::vector<int64_t> index = Indices(c);
  std::vector<unsigned char> x(
      static_cast<size_t>(c.batch * c.outer * c.extent * row));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<unsigned char>(i * 2654435761u >> 24);
  }
  const std::vector<unsigned char> poison(
      static_cast<size_t>(c.batch * c.outer * c.count * row), kPoison);
  const uint8_t fill[16] = {1, 2, 3, 4, 5, 6, 7, 8};
  const Device device_x(x), device_index(Stored(index, c.wide)), y(poison);
  if (!device_x.ok() || !device_index.ok() || !y.ok()) return "no memory";
  const std::string wrong = Synchronized(jax_layout::IndexSelect(
      plan, device_x.data(), device_index.data(), fill, y.data(), nullptr));
  if (!wrong.empty()) return wrong;
  const std::vector<unsigned char> found = y.Read();
  if (found.empty()) return "cannot read the device";
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t o = 0; o < c.outer; ++o) {
      for (int64_t i = 0; i < c.count; ++i) {
        const int64_t from = jax_layout::ResolveIndex(
            index[b * c.count + i], c.extent, plan.clip, plan.wrap);
        const auto* to = &found[((b * c.outer + o) * c.count + i) * row];
        const auto* of = from < 0
                             ? nullptr
                             : &x[((b * c.outer + o) * c.extent + from) * row];
        for (int64_t k = 0; k < row; ++k) {
          if (to[k] != (of ? of[k] : fill[k % c.itemsize])) {
            return "wrong at row " + std::to_string(i);
          }
        }
      }
    }
  }
  return "";
}

// Whole numbers in float32, of which sums in any order are exact.
std::string CheckAdd(const IndexCase& c, bool sorted) {
  const IndexPlan plan = ToPlan(c);
  std::vector<int64_t> index = Indices(c), places(index.size());
  std::vector<float> y(
      static_cast<size_t>(c.batch * c.outer * c.extent * c.inner)),
      source(static_cast<size_t>(c.batch * c.outer * c.count * c.inner));
  for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(i % 17);
  for (size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<float>(i % 13) - 6;
  }
  // As the handler does: rows are resolved, and those without one come last.
  for (int64_t b = 0; b < c.batch; ++b) {
    const auto first = index.begin() + b * c.count;
    std::vector<std::pair<int64_t, int64_t>> order;
    for (int64_t i = 0; i < c.count; ++i) {
      const int64_t at =
          jax_layout::ResolveIndex(first[i], c.extent, plan.clip, plan.wrap);
      order.push_back({at < 0 ? c.extent : at, i});
    }
    if (sorted) std::stable_sort(order.begin(), order.end());
    for (int64_t i = 0; i < c.count; ++i) {
      first[i] = order[i].first;
      places[b * c.count + i] = order[i].second;
    }
  }
  std::vector<float> expected = y;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t o = 0; o < c.outer; ++o) {
      for (int64_t i = 0; i < c.count; ++i) {
        const int64_t at = jax_layout::ResolveIndex(
            index[b * c.count + i], c.extent, plan.clip, plan.wrap);
        if (at < 0) continue;
        const int64_t from =
            (b * c.outer + o) * c.count + places[b * c.count + i];
        const int64_t to = (b * c.outer + o) * c.extent + at;
        for (int64_t k = 0; k < c.inner; ++k) {
          expected[to * c.inner + k] += source[from * c.inner + k];
        }
      }
    }
  }
  const auto bytes = [](const std::vector<float>& values) {
    std::vector<unsigned char> raw(4 * values.size());
    std::memcpy(raw.data(), values.data(), raw.size());
    return raw;
  };
  const Device device_y(bytes(y)), device_source(bytes(source)),
      device_index(Stored(index, c.wide)), order(Stored(places, false));
  if (!device_y.ok() || !device_source.ok() || !device_index.ok() ||
      !order.ok()) {
    return "no memory";
  }
  const std::string wrong = Synchronized(jax_layout::IndexAdd(
      plan, jax_layout::SumType::kF32, device_index.data(),
      sorted ? reinterpret_cast<const int32_t*>(order.data()) : nullptr,
      device_source.data(), device_y.data(), device_y.data(), nullptr));
  if (!wrong.empty()) return wrong;
  const std::vector<unsigned char> found = device_y.Read();
  return found == bytes(expected) ? "" : "wrong sums";
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "cuda_check: no CUDA device\n");
    return 100;
  }
  const std::string option = argc > 1 ? argv[1] : "";
  const int64_t most = option == "--at-most" && argc > 2
                           ? std::atoll(argv[2])
                           : std::numeric_limits<int64_t>::max();
  int cases = 0, failed = 0;
  const auto run = [&](const Case& c, int64_t itemsize, int64_t x_offset,
                       int64_t y_offset) {
    int64_t size = itemsize;
    for (int64_t n : c.shape) size *= n;
    if (size > most) return;
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
  for (const IndexCase& c : kIndexCases) {
    const int64_t rows = c.batch * c.outer * std::max(c.extent, c.count);
    if (rows * c.inner * c.itemsize > most) continue;
    const auto note = [&](const char* what, const std::string& wrong) {
      ++cases;
      if (wrong.empty()) return;
      ++failed;
      std::fprintf(stderr, "%s of %s: %s\n", what, Name(c).c_str(),
                   wrong.c_str());
    };
    note("index_select", CheckSelect(c));
    if (c.itemsize != 4) continue;
    note("index_add", CheckAdd(c, true));
    note("index_add, atomic", CheckAdd(c, false));
  }
  if (option == "--huge") {
    run({{47000, 47000}, {1, 0}}, 1, 0, 0);        // tiles, 2.2e9 elements
    run({{3, 750000000}, {1, 0}}, 1, 0, 0);        // boxes
    run({{700000, 3, 1100}, {1, 0, 2}}, 1, 1, 1);  // rows of single bytes
  }
  std::printf("cuda_check: %d of %d cases failed\n", failed, cases);
  return std::min(failed, 100);
}
