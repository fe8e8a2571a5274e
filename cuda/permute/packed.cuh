// SPDX-License-Identifier: Apache-2.0
//
// Everything else: chunks that are no vector, tiny axes (3 channels, a few
// heads), and reversals of many axes. A tile is a box over as many leading
// axes of x and of y as make long contiguous runs in both; shared memory holds
// it in x's order, and each thread knows where in it its part of y's is.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_

#include "cuda/permute/packed_plan.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

// Blocks on a multiprocessor, by its registers: one wave of them finds its
// places once for many tiles.
template <int kElement>
inline constexpr int kPackedResident = kElement == 1 ? 6 : 4;
// Blackwell's assembler wants more registers than a fourth block leaves, and of
// halves more than a second.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <int kElement>
inline constexpr int kPackedBounds = kElement == 2 ? 1 : 2;
#else
template <int kElement>
inline constexpr int kPackedBounds = kPackedResident<kElement>;
#endif

// Where each run of a tile begins, relative to the tile.
__device__ inline void BuildRuns(const PackedParams::Run* dims, int rank,
                                 uint32_t count, int64_t* offsets) {
  for (uint32_t run = threadIdx.x; run < count; run += kPackedThreads) {
    uint32_t index = run;
    int64_t offset = 0;
    for (int d = 0; d < rank; ++d) {
      const uint32_t rest = dims[d].extent.Quotient(index);
      offset += (index - rest * dims[d].extent.divisor) * dims[d].stride;
      index = rest;
    }
    offsets[run] = offset;
  }
}

// Where in shared memory the elements are that a thread gathers, in the order
// in which it does: the same ones of every tile, so registers hold them, or of
// bytes, for two more blocks, a part of shared memory that is the thread's own.
template <int kElement>
struct Places {
  static constexpr int kCount = PackedShare(kElement) / kElement;
  static constexpr int kTogether = kElement == 1 ? 8 : 4;
  static constexpr bool kShared = kElement == 1;
  char* table;
  uint32_t pair[kShared ? 1 : (kCount + 1) / 2];  // of 16 bits each

  // Of kN elements.
  template <int kN>
  struct Some {
    uint32_t pair[(kN + 1) / 2];
    __device__ uint32_t operator[](int k) const {
      return k % 2 == 0 ? pair[k / 2] & 0xffff : pair[k / 2] >> 16;
    }
  };

  // Four pairs of a thread lie together.
  __device__ char* At(int q) const {
    return table + (q / 4 * kPackedThreads + threadIdx.x) * 16 + q % 4 * 4;
  }

  __device__ void Put(int q, uint32_t value) {
    if constexpr (kShared) {
      StoreShared<4>(At(q), {{value}});
    } else {
      pair[q] = value;
    }
  }

  template <int kN>
  __device__ Some<kN> Take(int first) const {
    Some<kN> some;
    if constexpr (kShared) {
      constexpr int kBytes = kN * 2 < 16 ? kN * 2 : 16;
#pragma unroll
      for (int q = 0; q < kN / 2; q += kBytes / 4) {
        const auto held = LoadShared<kBytes>(At(first / 2 + q));
#pragma unroll
        for (int w = 0; w < kBytes / 4; ++w) some.pair[q + w] = held.word[w];
      }
    } else if constexpr (kN == 1) {
      some.pair[0] = pair[first / 2] >> (first % 2 * 16);
    } else {
#pragma unroll
      for (int q = 0; q < kN / 2; ++q) some.pair[q] = pair[first / 2 + q];
    }
    return some;
  }

  // Place k is of element k % side of the thread's unit k / side. A run's last
  // vector may end after it.
  __device__ void Find(const PackedParams& p) {
    const uint32_t side = PackedAccess(p.y_vector) / kElement;
    const uint32_t last = p.y_runs * p.y_run.divisor - 1;
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      uint32_t index[kTogether], position[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const uint32_t k = first + t, e = k & (side - 1);
        uint32_t unit = threadIdx.x + k / side * kPackedThreads;
        unit = unit < last ? unit : last;
        const uint32_t run = p.y_run.Quotient(unit);
        const uint32_t column = (unit - run * p.y_run.divisor) * side + e;
        index[t] =
            run * p.y_length + (column < p.y_length ? column : p.y_length - 1);
        position[t] = 0;
      }
#pragma unroll 1
      for (int d = 0; d < p.rank - 1; ++d) {
        const PackedParams::Order order = p.order[d];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          const uint32_t rest = order.Quotient(index[t]);
          position[t] += (index[t] - rest * order.extent) * order.stride;
          index[t] = rest;
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        position[t] += index[t] * p.last_stride;
        position[t] = Padded(kElement, position[t] * kElement) / kElement;
      }
#pragma unroll
      for (int t = 0; t < kTogether; t += 2) {
        Put((first + t) / 2, position[t] | position[t + 1] << 16);
      }
    }
  }
};

// Runs of x to shared memory, kVector bytes per load, several in flight;
// at most kMost; load(i) is what stands at byte i of the tile. Past the last
// unit a thread takes that again, and does not keep it, so that no load waits
// for a branch.
template <int kElement, int kVector, int kMost, typename Load>
__device__ inline void LoadRuns(const PackedParams& p, const int64_t* runs,
                                char* shared, Load load) {
  constexpr int kUnits = PackedShare(kElement) / kVector;
  constexpr int kInFlight = kUnits < kMost ? kUnits : kMost;
  const uint32_t units = p.x_runs * p.x_run.divisor;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < units + threadIdx.x;
       first += kInFlight * kPackedThreads) {
    Packet<kVector> held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      uint32_t unit = first + k * kPackedThreads;
      unit = unit < units ? unit : units - 1;
      const uint32_t run = p.x_run.Quotient(unit);
      const uint32_t column = unit - run * p.x_run.divisor;
      held[k] = load(runs[run] + column * kVector);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32_t unit = first + k * kPackedThreads;
      if (unit < units) {
        // A vector never straddles a row of banks, so its padding is uniform;
        // it is only as aligned as the pad.
        char* to = shared + Padded(kElement, unit * kVector);
        constexpr int kPad = kElement < 4 ? 4 : kElement;
        if constexpr (kVector <= kPad) {
          StoreShared<kVector>(to, held[k]);
        } else {
          constexpr int kWords = kPad / 4;
#pragma unroll
          for (int part = 0; part < kVector / kPad; ++part) {
            Packet<kPad> piece;
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              piece.word[w] = held[k].word[part * kWords + w];
            }
            StoreShared<kPad>(to + part * kPad, piece);
          }
        }
      }
    }
  }
}

// From shared memory, what stands at places `first` and after.
template <int kElement, int kVector>
__device__ inline Packet<kVector> Gather(const char* shared,
                                         const Places<kElement>& places,
                                         int first) {
  Packet<kVector> out = {};
  const auto some = places.template Take<kVector / kElement>(first);
#pragma unroll
  for (int e = 0; e < kVector / kElement; ++e) {
    const uint32_t place = some[e];
    const auto element = LoadShared<kElement>(shared + place * kElement);
    const int at = e * kElement;  // byte of the vector
    if constexpr (kElement < 4) {
      out.word[at / 4] |= element.word[0] << (at % 4 * 8);
    } else {
#pragma unroll
      for (int w = 0; w < kElement / 4; ++w) {
        out.word[at / 4 + w] = element.word[w];
      }
    }
  }
  return out;
}

// Shared memory to runs of y, kVector bytes per store. Past the last unit a
// thread stores that again, the same bytes, so that nothing branches.
template <int kElement, int kVector>
__device__ inline void StoreRuns(const PackedParams& p, char* y,
                                 const int64_t* runs, const char* shared,
                                 const Places<kElement>& places) {
  constexpr int kSide = kVector / kElement;
  constexpr int kUnits = PackedShare(kElement) / kVector;
  // As many as 8 registers hold.
  constexpr int kTogether = kVector == 16 ? 2 : 4;
  const uint32_t units = p.y_runs * p.y_run.divisor;
#pragma unroll
  for (int first = 0; first < kUnits; first += kTogether) {
    if (first * kPackedThreads >= units) return;  // the whole block
    char* to[kTogether];
    Packet<kVector> out[kTogether];
#pragma unroll
    for (int h = 0; h < kTogether; ++h) {
      uint32_t unit = threadIdx.x + (first + h) * kPackedThreads;
      unit = unit < units ? unit : units - 1;
      const uint32_t run = p.y_run.Quotient(unit);
      const uint32_t column = unit - run * p.y_run.divisor;
      to[h] = y + runs[run] + column * kVector;
      out[h] = Gather<kElement, kVector>(shared, places, (first + h) * kSide);
    }
#pragma unroll
    for (int h = 0; h < kTogether; ++h) StoreGlobal<kVector>(to[h], out[h]);
  }
}

// The same for runs that begin anywhere: the tile is put into y's order in
// shared memory, of whose words vectors of y are made. The bytes at the ends of
// a run are stored by themselves, by a warp.
template <int kElement>
__device__ inline void StoreAnywhere(const PackedParams& p, char* y,
                                     const int64_t* runs, char* shared,
                                     const Places<kElement>& places) {
  constexpr int kUnits = PackedShare(kElement) / 16;
  const uint32_t units = p.y_runs * p.y_run.divisor;
  const int bytes = static_cast<int>(p.y_length) * kElement;
  Packet<16> held[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    held[k] = Gather<kElement, 16>(shared, places, k * (16 / kElement));
  }
  __syncthreads();  // all have what they need
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t unit = threadIdx.x + k * kPackedThreads;
    if (unit < units) StoreShared<16>(shared + unit * 16, held[k]);
  }
  __syncthreads();  // y's order is here
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    uint32_t unit = threadIdx.x + k * kPackedThreads;
    unit = unit < units ? unit : units - 1;
    const uint32_t run = p.y_run.Quotient(unit);
    const uint32_t column = unit - run * p.y_run.divisor;
    char* to = y + runs[run];
    const int first = -static_cast<int>(reinterpret_cast<uintptr_t>(to)) & 15;
    const int at = first + static_cast<int>(column) * 16;
    if (at + 16 <= bytes) {
      const char* from = shared + (unit - column) * 16 + (at & ~3);
      // A fourth word after the first, or none.
      const int fifth = at % 4 == 0 ? 12 : 16;
      Packet<16> out;
      uint32_t low = LoadShared<4>(from).word[0];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t high =
            LoadShared<4>(from + (w < 3 ? 4 * w + 4 : fifth)).word[0];
        out.word[w] = __funnelshift_r(low, high, at * 8);
        low = high;
      }
      StoreGlobal<16>(to + at, out);
    }
  }
#pragma unroll 2
  for (uint32_t slot = threadIdx.x; slot < 32 * p.y_runs;
       slot += kPackedThreads) {
    const uint32_t run = slot / 32;
    char* to = y + runs[run];
    const int at = EdgeByte<16>(to, bytes, static_cast<int>(slot % 32));
    const char* row = shared + run * p.y_run.divisor * 16;
    if (at >= 0) StoreGlobal<1>(to + at, LoadShared<1>(row + at));
  }
}

// Launch: 1-D, one wave of blocks at most; block b moves tiles b, b + grid,
// b + 2 grid, ... All tiles are whole: the last along an axis is pulled back
// over its neighbour, and both write the same bytes.
template <int kElement>
__global__
__launch_bounds__(kPackedThreads, kPackedBounds<kElement>) void PackedKernel(
    const __grid_constant__ PackedParams p, const char* __restrict__ x,
    char* __restrict__ y) {
  char* shared = SharedMemory();
  const PackedShared parts(kElement, p.elements, p.x_runs, p.y_runs);
  auto* x_runs = reinterpret_cast<int64_t*>(shared + parts.x_runs);
  auto* y_runs = reinterpret_cast<int64_t*>(shared + parts.y_runs);
  BuildRuns(p.x_run_dims, p.x_run_rank, p.x_runs, x_runs);
  BuildRuns(p.y_run_dims, p.y_run_rank, p.y_runs, y_runs);

  Places<kElement> places;
  places.table = shared + parts.places;
  places.Find(p);
  for (uint32_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    int64_t x_offset, y_offset;
    p.walk.Locate(tile, &x_offset, &y_offset);
    __syncthreads();  // the runs are known, the last tile has left
    const char *from = x + x_offset, *x_end = x + p.size;
    // Beside the places, 16 registers of narrow elements.
    constexpr int kNarrow = kElement < 4 ? 4 : kElement;
    constexpr int kMost = kElement < 4 ? 8 : 16;
    if (p.x_vector == 16) {
      LoadRuns<kElement, 16, kMost>(p, x_runs, shared, [&](int64_t at) {
        return LoadGlobal<16>(from + at);
      });
    } else if (p.x_vector == kNarrow) {
      LoadRuns<kElement, kNarrow, kMost>(p, x_runs, shared, [&](int64_t at) {
        return LoadGlobal<kNarrow>(from + at);
      });
    } else if constexpr (kElement < 4) {
      if (from - (reinterpret_cast<uintptr_t>(from) & 3) >= x &&
          from + p.reach + 20 <= x_end) {
        LoadRuns<kElement, 16, 2>(p, x_runs, shared, [&](int64_t at) {
          return LoadAcross<16>(from + at);
        });
      } else {  // words at an end of x are not all there
        LoadRuns<kElement, 16, 1>(p, x_runs, shared, [&](int64_t at) {
          return LoadBytes<16>(from + at, x_end);
        });
      }
    }
    __syncthreads();  // the tile is here
    if (p.y_vector == 16) {
      StoreRuns<kElement, 16>(p, y + y_offset, y_runs, shared, places);
    } else if (p.y_vector == kNarrow) {
      StoreRuns<kElement, kNarrow>(p, y + y_offset, y_runs, shared, places);
    } else if constexpr (kElement < 4) {
      StoreAnywhere<kElement>(p, y + y_offset, y_runs, shared, places);
    }
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
