// SPDX-License-Identifier: Apache-2.0
//
// Rows that an index names. A thread moves units: as many bytes of a row, up to
// 16, as divide it. Units are counted in the order of the selected array, so
// neighbouring threads meet in the cache lines of a row.
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "cuda/fast_division.cuh"
#include "cuda/index/index.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // units per thread

// Counts of units below this are handled in 32 bits; the slack keeps a partial
// block past the end below 2^31 too, as FastDivider<uint32_t> requires.
constexpr int64_t kMaxUnits32 = (int64_t{1} << 31) - (1 << 16);

// Where unit u of the selected array is. Strides and offsets are bytes.
template <typename UInt>
struct IndexParams {
  UInt units;
  FastDivider<UInt> row, count, outer;  // units of a row, rows, slices
  int64_t extent, row_bytes;
  bool wide, clip, wrap;
  alignas(16) char fill[16];  // a unit

  IndexParams(const IndexPlan& p, int unit)
      : units(static_cast<UInt>(p.batch * p.outer * p.count * p.inner_bytes() /
                                unit)),
        row(static_cast<UInt>(p.inner_bytes() / unit)),
        count(static_cast<UInt>(p.count)),
        outer(static_cast<UInt>(p.outer)),
        extent(p.extent),
        row_bytes(p.inner_bytes()),
        wide(p.wide),
        clip(p.clip),
        wrap(p.wrap),
        fill() {}
};

struct Place {
  int64_t column;    // bytes into the row
  int64_t slice;     // of batch x outer
  int64_t position;  // i, of the row
  int64_t batch;     // indices before this batch
};

template <typename UInt>
__device__ Place Locate(const IndexParams<UInt>& p, UInt unit, int unit_bytes) {
  const UInt row = p.row.Quotient(unit);
  const UInt slice = p.count.Quotient(row);
  Place at;
  at.column = static_cast<int64_t>(unit - row * p.row.divisor) * unit_bytes;
  at.slice = slice;
  at.position = row - slice * p.count.divisor;
  at.batch = static_cast<int64_t>(p.outer.Quotient(slice)) * p.count.divisor;
  return at;
}

__device__ inline int64_t LoadIndex(const void* index, bool wide, int64_t i) {
  return wide ? static_cast<int64_t>(
                    __ldg(static_cast<const long long*>(index) + i))
              : static_cast<int64_t>(__ldg(static_cast<const int*>(index) + i));
}

// Several, on their way together.
template <int kCount>
__device__ inline void LoadIndices(const void* index, bool wide,
                                   const int64_t (&at)[kCount],
                                   int64_t (&name)[kCount]) {
  if (wide) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) name[k] = LoadIndex(index, true, at[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) name[k] = LoadIndex(index, false, at[k]);
  }
}

// What a thread moves: every kThreads-th unit of a block's kThreads *
// kInFlight. Past the last unit it takes that again, so that no load waits for
// a branch.
template <typename UInt>
struct Units {
  UInt unit[kInFlight];
  int64_t row[kInFlight];                       // -1 for none
  int64_t slice[kInFlight], column[kInFlight];  // bytes: of x or y, of the row

  __device__ Units(const IndexParams<UInt>& p, const void* index,
                   int unit_bytes) {
    int64_t at[kInFlight], name[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      unit[k] = UInt{blockIdx.x} * (kThreads * kInFlight) + k * kThreads +
                threadIdx.x;
      const Place place =
          Locate(p, unit[k] < p.units ? unit[k] : p.units - 1, unit_bytes);
      at[k] = place.batch + place.position;
      slice[k] = place.slice * p.extent * p.row_bytes;
      column[k] = place.column;
    }
    LoadIndices(index, p.wide, at, name);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      row[k] = ResolveIndex(name[k], p.extent, p.clip, p.wrap);
    }
  }
};

// Launch: 1-D; a block writes kThreads * kInFlight consecutive units of y,
// whose loads go out together.
template <int kUnit, typename UInt>
__global__ __launch_bounds__(kThreads) void SelectKernel(
    const __grid_constant__ IndexParams<UInt> p, const char* __restrict__ x,
    const void* __restrict__ index, char* __restrict__ y) {
  const Units<UInt> of(p, index, kUnit);
  Packet<kUnit> held[kInFlight], fill;
  memcpy(fill.word, p.fill, kUnit);
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t row = of.row[k] < 0 ? 0 : of.row[k];
    held[k] =
        LoadGlobal<kUnit>(x + of.slice[k] + row * p.row_bytes + of.column[k]);
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
    for (int w = 0; w < Packet<kUnit>::kWords; ++w) {
      if (of.row[k] < 0) held[k].word[w] = fill.word[w];
    }
    if (of.unit[k] < p.units) {
      StoreGlobal<kUnit>(y + static_cast<int64_t>(of.unit[k]) * kUnit, held[k]);
    }
  }
}

// An element in memory, and in the sum.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  __device__ static Sum Load(Stored v) { return v; }
  __device__ static Stored Store(Sum v) { return v; }
};
struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  __device__ static Sum Load(Stored v) { return FloatOfBf16(v); }
  __device__ static Stored Store(Sum v) { return Bf16OfFloat(v); }
};
struct F16 {
  using Stored = uint16_t;
  using Sum = float;
  __device__ static Sum Load(Stored v) { return FloatOfF16(v); }
  __device__ static Stored Store(Sum v) { return F16OfFloat(v); }
};

// A unit as elements.
template <int kUnit, typename Stored>
struct Elements {
  Stored value[kUnit / sizeof(Stored)];
};

template <int kUnit, typename Stored>
__device__ Elements<kUnit, Stored> ToElements(const Packet<kUnit>& packet) {
  Elements<kUnit, Stored> e;
  memcpy(e.value, packet.word, kUnit);
  return e;
}

// Of what the kernel also writes, so not by the read-only path.
template <int kUnit, typename Stored>
__device__ Elements<kUnit, Stored> LoadWritable(const char* from) {
  return ToElements<kUnit, Stored>(
      Unpack<kUnit>(__ldcg(reinterpret_cast<const Word<kUnit>*>(from))));
}

// Launch: 1-D; a thread per unit of source, in the order of the sorted index.
// Where a row of y begins to occur in it, the thread adds all that do, in
// order, and owns that unit of y; the others leave. What occurs again is
// fetched in eights, units of 8 bytes and more in fours: their places, then
// their rows.
template <typename Element, int kUnit, typename UInt>
__global__ __launch_bounds__(kThreads, 3) void AddSortedKernel(
    const __grid_constant__ IndexParams<UInt> p, const void* __restrict__ index,
    const int* __restrict__ order, const char* __restrict__ source, char* y) {
  using Stored = typename Element::Stored;
  constexpr int kCount = kUnit / sizeof(Stored);
  constexpr int kFetched = kUnit < 8 ? 8 : 4;
  const UInt unit = UInt{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= p.units) return;
  const Place at = Locate(p, unit, kUnit);
  const int64_t count = p.count.divisor, last = at.batch + count - 1;
  const int64_t here = at.batch + at.position;
  // Before, here and behind, where there are such.
  int64_t name[3];
  LoadIndices<3>(index, p.wide,
                 {here - (at.position > 0), here, here + (here < last)}, name);
  const int from_here = __ldg(order + here);  // also on its way
  if (at.position > 0 && name[0] == name[1]) return;
  const int64_t row = ResolveIndex(name[1], p.extent, p.clip, p.wrap);
  if (row < 0) return;
  source += at.slice * count * p.row_bytes + at.column;
  char* to = y + (at.slice * p.extent + row) * p.row_bytes + at.column;
  const auto old = LoadWritable<kUnit, Stored>(to);
  typename Element::Sum sum[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum[e] = Element::Load(old.value[e]);
  const auto add = [&](const Packet<kUnit>& packet) {
    const auto addend = ToElements<kUnit, Stored>(packet);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] += Element::Load(addend.value[e]);
  };
  add(LoadGlobal<kUnit>(source + from_here * p.row_bytes));
  bool more = here < last && name[2] == name[1];
#pragma unroll 1
  for (int64_t first = here + 1; more; first += kFetched) {
    int64_t place[kFetched], names[kFetched];
    int from[kFetched];
#pragma unroll
    for (int k = 0; k < kFetched; ++k) {
      place[k] = first + k < last ? first + k : last;
      from[k] = __ldg(order + place[k]);
    }
    LoadIndices(index, p.wide, place, names);
    Packet<kUnit> held[kFetched];
#pragma unroll
    for (int k = 0; k < kFetched; ++k) {
      held[k] = LoadGlobal<kUnit>(source + from[k] * p.row_bytes);
    }
#pragma unroll
    for (int k = 0; k < kFetched; ++k) {
      more = first + k <= last && names[k] == name[1];
      if (more) add(held[k]);
    }
  }
  Stored out[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) out[e] = Element::Store(sum[e]);
  Packet<kUnit> packet = {};
  memcpy(packet.word, out, kUnit);
  StoreGlobal<kUnit>(to, packet);
}

// Launch: 1-D; a block adds kThreads * kInFlight consecutive elements of
// source, whose loads go out together.
template <typename T, typename UInt>
__global__ __launch_bounds__(kThreads) void AddAtomicKernel(
    const __grid_constant__ IndexParams<UInt> p, const void* __restrict__ index,
    const char* __restrict__ source, char* y) {
  const Units<UInt> of(p, index, sizeof(T));
  Packet<sizeof(T)> held[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const UInt unit = of.unit[k] < p.units ? of.unit[k] : p.units - 1;
    held[k] =
        LoadGlobal<sizeof(T)>(source + static_cast<int64_t>(unit) * sizeof(T));
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    if (of.unit[k] < p.units && of.row[k] >= 0) {
      atomicAdd(reinterpret_cast<T*>(y + of.slice[k] + of.row[k] * p.row_bytes +
                                     of.column[k]),
                ToElements<sizeof(T), T>(held[k]).value[0]);
    }
  }
}

template <typename... Params>
Status Launch(const char* name, void (*kernel)(Params...), int64_t units,
              int64_t units_per_block, cudaStream_t stream,
              const std::type_identity_t<Params>&... params) {
  const int64_t blocks = (units + units_per_block - 1) / units_per_block;
  if (blocks > INT32_MAX) {
    return Status::Error(std::string(name) +
                         ": too large for one launch, got " +
                         std::to_string(blocks) + " blocks.");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params...);
  if (error == cudaSuccess) return Status::Ok();
  (void)cudaGetLastError();  // ours to report, not the next caller's
  return Status::Error(std::string(name) + ": the launch failed: " +
                       cudaGetErrorString(error) + ".");
}

// The largest power of two, up to 16, that divides n.
int UnitOf(int64_t n) {
  n |= 16;
  return static_cast<int>(n & -n);
}

// f(unit as a constant, a UInt that counts the units).
template <typename F>
Status Dispatch(const IndexPlan& p, int unit, const F& f) {
  const int64_t units = p.batch * p.outer * p.count * p.inner_bytes() / unit;
  const auto sized = [&](auto constant) {
    return units <= kMaxUnits32 ? f(constant, uint32_t{})
                                : f(constant, uint64_t{});
  };
  switch (unit) {
    case 1:
      return sized(std::integral_constant<int, 1>());
    case 2:
      return sized(std::integral_constant<int, 2>());
    case 4:
      return sized(std::integral_constant<int, 4>());
    case 8:
      return sized(std::integral_constant<int, 8>());
    default:
      return sized(std::integral_constant<int, 16>());
  }
}

struct Adder {
  const IndexPlan& p;
  const void* index;
  const int32_t* order;
  const void* source;
  void* y;
  cudaStream_t stream;

  template <typename Element>
  Status Sorted() const {
    return Dispatch(p, UnitOf(p.inner_bytes()), [&](auto unit, auto count) {
      using UInt = decltype(count);
      constexpr int kUnit = unit;
      if constexpr (kUnit < sizeof(typename Element::Stored)) {
        return Status::Error("index_add: a row is no multiple of an element.");
      } else {
        const IndexParams<UInt> params(p, kUnit);
        return Launch("index_add", AddSortedKernel<Element, kUnit, UInt>,
                      params.units, kThreads, stream, params, index, order,
                      static_cast<const char*>(source), static_cast<char*>(y));
      }
    });
  }

  template <typename T>
  Status Atomic() const {
    return Dispatch(p, sizeof(T), [&](auto unit, auto count) {
      using UInt = decltype(count);
      if constexpr (unit != sizeof(T)) {
        return Status::Error("index_add: no atomic sum of this dtype.");
      } else {
        const IndexParams<UInt> params(p, unit);
        return Launch("index_add", AddAtomicKernel<T, UInt>, params.units,
                      kThreads * kInFlight, stream, params, index,
                      static_cast<const char*>(source), static_cast<char*>(y));
      }
    });
  }
};

}  // namespace

Status IndexSelect(const IndexPlan& plan, const void* x, const void* index,
                   const uint8_t* fill, void* y, cudaStream_t stream) {
  return Dispatch(plan, UnitOf(plan.inner_bytes()), [&](auto unit, auto count) {
    using UInt = decltype(count);
    constexpr int kUnit = unit;
    IndexParams<UInt> params(plan, kUnit);
    // Rows are whole elements, and so are units of several.
    for (int b = 0; b < kUnit; ++b) {
      params.fill[b] = static_cast<char>(fill[b % plan.itemsize]);
    }
    return Launch("index_select", SelectKernel<kUnit, UInt>, params.units,
                  kThreads * kInFlight, stream, params,
                  static_cast<const char*>(x), index, static_cast<char*>(y));
  });
}

Status IndexAdd(const IndexPlan& plan, SumType type, const void* index,
                const int32_t* order, const void* source, const void* x,
                void* y, cudaStream_t stream) {
  if (x != y) return Status::Error("index_add: x must be y.");
  const Adder add = {plan, index, order, source, y, stream};
  if (order == nullptr) {
    switch (type) {
      case SumType::kF32:
        return add.Atomic<float>();
      case SumType::kF64:
        return add.Atomic<double>();
      case SumType::kI32:
        return add.Atomic<unsigned>();
      case SumType::kI64:
        return add.Atomic<unsigned long long>();
      default:
        return Status::Error("index_add: no atomic sum of this dtype.");
    }
  }
  switch (type) {
    case SumType::kF32:
      return add.Sorted<Plain<float>>();
    case SumType::kF64:
      return add.Sorted<Plain<double>>();
    case SumType::kBF16:
      return add.Sorted<Bf16>();
    case SumType::kF16:
      return add.Sorted<F16>();
    case SumType::kI8:
      return add.Sorted<Plain<uint8_t>>();
    case SumType::kI16:
      return add.Sorted<Plain<uint16_t>>();
    case SumType::kI32:
      return add.Sorted<Plain<uint32_t>>();
    default:
      return add.Sorted<Plain<uint64_t>>();
  }
}

}  // namespace jax_layout
