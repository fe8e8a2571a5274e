// SPDX-License-Identifier: Apache-2.0
//
// The C interface that tests/cuda/test_cuda_emulation.py calls. Every function
// returns an empty string, or what went wrong.
#include <cstring>
#include <string>
#include <variant>

#include "core/permute/plan.h"
#include "cuda/permute/packed_plan.h"
#include "cuda/permute/permute.h"
#include "cuda/vector_access.cuh"
#include "emulation.h"

namespace {

using jax_layout::PermutePlan;
using jax_layout::Status;

std::string result;

const char* Return(std::string text) {
  result = std::move(text);
  return result.c_str();
}

emulation::Order ToOrder(int order) {
  if (order == 0) return {emulation::Order::kForward};
  if (order == 1) return {emulation::Order::kReversed};
  return {emulation::Order::kShuffled, static_cast<uint64_t>(order)};
}

Status Plan(const int64_t* shape, const int64_t* axes, int rank,
            int64_t itemsize, PermutePlan* plan) {
  const auto n = static_cast<size_t>(rank);
  return jax_layout::MakePermutePlan({shape, n}, {axes, n}, itemsize, plan);
}

// The byte that stands at an offset of a virtual x.
char ByteAt(int64_t offset) {
  uint64_t h = static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15u;
  return static_cast<char>(h >> 56 ^ h >> 33);
}

// Where y's byte comes from in x, from the definition of a permute alone.
int64_t Source(int64_t offset, const int64_t* shape, const int64_t* axes,
               int rank, int64_t itemsize) {
  int64_t index = offset / itemsize, from = 0;
  for (int d = rank - 1; d >= 0; --d) {
    int64_t stride = 1;
    for (int e = static_cast<int>(axes[d]) + 1; e < rank; ++e) {
      stride *= shape[e];
    }
    from += index % shape[axes[d]] * stride;
    index /= shape[axes[d]];
  }
  return from * itemsize + offset % itemsize;
}

// Planted defects, which the emulation must report.

__global__ void Reverse(char* y, bool barrier) {
  char* shared = jax_layout::SharedMemory();
  shared[threadIdx.x] = static_cast<char>(threadIdx.x);
  if (barrier) __syncthreads();
  __stwb(y + threadIdx.x, shared[blockDim.x - 1 - threadIdx.x]);
}

__global__ void OneTooFar(char* y, bool raw) {
  if (raw) {
    y[threadIdx.x + 1] = 1;
  } else {
    __stwb(y + threadIdx.x + 1, char{1});
  }
}

__global__ void Divergent(char* y, bool leave) {
  if (threadIdx.x == 7) {
    if (leave) return;
    __syncthreads();
    __stwb(y, char{1});  // keeps the compiler from making the two barriers one
  } else {
    __syncthreads();
  }
}

__global__ void Misaligned(char* y) {
  __stwb(reinterpret_cast<unsigned*>(y + 2 * threadIdx.x), 0u);
}

}  // namespace

extern "C" {

// The family that a permute goes to, its parameters, and its grid.
const char* permute_family(const int64_t* shape, const int64_t* axes, int rank,
                           int64_t itemsize, int alignment) {
  PermutePlan plan;
  const Status status = Plan(shape, axes, rank, itemsize, &plan);
  if (!status.ok()) return Return(status.message);
  struct Describe {
    std::string operator()(const jax_layout::CopyParams& p) {
      return "copy " + std::to_string(p.unit);
    }
    std::string operator()(const jax_layout::RowsParams<uint32_t>& p) {
      return "rows " + std::to_string(p.unit);
    }
    std::string operator()(const jax_layout::RowsParams<uint64_t>& p) {
      return "rows64 " + std::to_string(p.unit);
    }
    std::string operator()(const jax_layout::TileParams& p) {
      return "tile " + std::to_string(p.element) + " " +
             std::to_string(p.load) + " " + std::to_string(p.store) + " " +
             std::to_string(p.edge);
    }
    std::string operator()(const jax_layout::PackedParams& p) {
      const auto bytes = [&](int vector) {
        return jax_layout::PackedAccess(p.element, vector);
      };
      return "packed " + std::to_string(p.element) + " " +
             std::to_string(p.x.vector) + " " + std::to_string(p.y.vector) +
             " " + std::to_string(p.x.length.divisor * bytes(p.x.vector)) +
             " " + std::to_string(p.y.length.divisor * bytes(p.y.vector)) +
             " " + std::to_string(p.elements * p.element) + " " +
             std::to_string(p.threads);
    }
  };
  return Return(std::visit(
      Describe(), jax_layout::ChoosePermuteKernel(plan, alignment).params));
}

// y = x permuted; order: 0 forward, 1 reversed, else the seed of a shuffle.
const char* permute(const void* x, void* y, const int64_t* shape,
                    const int64_t* axes, int rank, int64_t itemsize,
                    int order) {
  PermutePlan plan;
  Status status = Plan(shape, axes, rank, itemsize, &plan);
  if (!status.ok()) return Return(status.message);
  if (plan.size == 0) return Return("");
  emulation::Configure(ToOrder(order), {.x = static_cast<const char*>(x),
                                        .y = static_cast<char*>(y),
                                        .size = plan.size,
                                        .load = {},
                                        .store = {}});
  status =
      jax_layout::Permute(jax_layout::ChoosePermuteKernel(plan), x, y, nullptr);
  return Return(status.ok() ? emulation::Error() : status.message);
}

// The same without memory: x holds ByteAt, y is checked as it is written.
// `samples` blocks run: the first, the last, and random ones.
const char* permute_virtual(const int64_t* shape, const int64_t* axes, int rank,
                            int64_t itemsize, int alignment, int samples) {
  PermutePlan plan;
  Status status = Plan(shape, axes, rank, itemsize, &plan);
  if (!status.ok()) return Return(status.message);
  // Two pointers of exactly this alignment, 2^61 apart.
  const auto base = [&](uintptr_t at) {
    return reinterpret_cast<char*>(
        at + static_cast<uintptr_t>(alignment < 16 ? alignment : 0));
  };
  char *x = base(uintptr_t{1} << 60), *y = base(uintptr_t{1} << 61);
  int64_t stored = 0;
  const jax_layout::PermuteKernel kernel =
      jax_layout::ChoosePermuteKernel(plan, alignment);
  const auto* packed = std::get_if<jax_layout::PackedParams>(&kernel.params);
  emulation::Configure(
      {},
      {.x = x,
       .y = y,
       .size = plan.size,
       .load =
           [](int64_t offset, char* to, size_t bytes) {
             for (size_t b = 0; b < bytes; ++b) to[b] = ByteAt(offset + b);
           },
       .store =
           [&](int64_t offset, const char* from, size_t bytes) {
             stored += static_cast<int64_t>(bytes);
             for (size_t b = 0; b < bytes; ++b) {
               const int64_t at = offset + static_cast<int64_t>(b);
               if (from[b] != ByteAt(Source(at, shape, axes, rank, itemsize))) {
                 emulation::Fail("wrong byte at offset " + std::to_string(at));
               }
             }
           }},
      {.count = samples, .grid = packed ? packed->tiles : 0});
  status =
      jax_layout::Permute(jax_layout::ChoosePermuteKernel(plan), x, y, nullptr);
  if (!status.ok()) return Return(status.message);
  if (!emulation::Error().empty()) return Return(emulation::Error());
  return Return(stored > 0 ? "" : "nothing was stored");
}

// Checks FastDivider of 32 or 64 bits against the hardware's division.
const char* fast_division(int bits, uint64_t divisor, uint64_t n) {
  const uint64_t quotient =
      bits == 32
          ? jax_layout::FastDivider<uint32_t>(static_cast<uint32_t>(divisor))
                .Quotient(static_cast<uint32_t>(n))
          : jax_layout::FastDivider<uint64_t>(divisor).Quotient(n);
  if (quotient == n / divisor) return Return("");
  return Return(std::to_string(n) + " / " + std::to_string(divisor) + " gave " +
                std::to_string(quotient));
}

// Runs a kernel with a defect on 64 bytes of y. The races show as bytes that
// are not a reversed sequence, the rest as a message; "write" is a store that
// only a sanitizer or a guard can see.
const char* planted(const char* defect, char* y, int order) {
  const std::string name = defect;
  emulation::Configure(ToOrder(order),
                       {.x = y, .y = y, .size = 64, .load = {}, .store = {}});
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = 64;
  if (name == "none" || name == "race") {
    cudaLaunchKernelEx(&config, Reverse, y, name == "none");
  } else if (name == "bounds" || name == "write") {
    cudaLaunchKernelEx(&config, OneTooFar, y, name == "write");
  } else if (name == "exit" || name == "divergence") {
    cudaLaunchKernelEx(&config, Divergent, y, name == "exit");
  } else if (name == "alignment") {
    config.blockDim = dim3(30);
    cudaLaunchKernelEx(&config, Misaligned, y);
  } else {
    return Return("unknown defect");
  }
  return Return(emulation::Error());
}

}  // extern "C"
