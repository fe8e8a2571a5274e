// SPDX-License-Identifier: Apache-2.0
//
// Everything else: chunks that are no vector, tiny axes (3 channels, a few
// heads), and reversals of many axes. A tile is a box over as many leading
// axes of x and of y as make long contiguous runs in both; shared memory holds
// it in x's order, and each thread knows where in it its part of y's is.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_

#include <type_traits>

#include "cuda/permute/packed_plan.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

// Blocks on a multiprocessor, by its registers: one wave of them finds its
// places once for many tiles.
__host__ __device__ constexpr int PackedResident(int threads) {
  return threads == kPackedLargeThreads ? 2 : threads < 192 ? 8 : 4;
}
// Offsets of 64 bits leave a block less room.
template <int kThreads, typename Offset>
inline constexpr int kPackedBounds =
    sizeof(Offset) == 8 ? 2 : PackedResident(kThreads);

// A thread's accesses of a tile, on one side: the same ones of every tile, so
// registers hold where they are, relative to the tile.
template <int kThreads, int kBytes, int kShare, typename Offset>
struct Accesses {
  static constexpr int kCount = kShare / kBytes;
  uint32_t units;  // of the tile
  Offset at[kCount];

  // Past the last unit a thread takes that again, so that no load waits for a
  // branch, and two store the same bytes.
  __device__ uint32_t Unit(int k) const {
    const uint32_t unit = threadIdx.x + k * kThreads;
    return unit < units ? unit : units - 1;
  }

  __device__ Accesses(const PackedParams::Runs& runs)
      : units(runs.count * runs.length.divisor) {
    uint32_t run[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      run[k] = runs.length.Quotient(Unit(k));
      at[k] = (Unit(k) - run[k] * runs.length.divisor) * kBytes;
    }
#pragma unroll 1
    for (int d = 0; d < runs.rank; ++d) {
      const PackedParams::Run dim = runs.dims[d];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t rest = dim.extent.Quotient(run[k]);
        at[k] += (run[k] - rest * dim.extent.divisor) *
                 static_cast<Offset>(dim.stride);
        run[k] = rest;
      }
    }
  }
};

// Where in shared memory the elements are that a thread gathers, in the order
// in which it does, two to a register.
template <int kElement, int kCount>
struct Places {
  static constexpr int kSlot = PackedSlot(kElement);
  uint32_t pair[kCount / 2];

  __device__ uint32_t operator[](int k) const {
    return k % 2 == 0 ? pair[k / 2] & 0xffff : pair[k / 2] >> 16;
  }

  // Pairs: the compiler would take them all apart before its loop over tiles,
  // for which large blocks lack registers.
  __device__ void Keep() {
#pragma unroll
    for (uint32_t& each : pair) asm volatile("" : "+r"(each));
  }

  // Place k is of element k % kSide of the thread's access k / kSide. A run's
  // last access may end after it where runs begin anywhere, as kAnywhere says.
  template <bool kAnywhere, int kThreads, int kBytes, int kShare,
            typename Offset>
  __device__ void Find(const PackedParams& p,
                       const Accesses<kThreads, kBytes, kShare, Offset>& y) {
    constexpr int kSide = kBytes / kElement;
    // As many as registers allow.
    constexpr int kMost = InLargeBlocks(kElement, kThreads) ? 2
                          : kElement == 2                   ? 4
                                                            : 8;
    constexpr int kTogether = kCount < kMost ? kCount : kMost;
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      uint32_t index[kTogether], position[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const uint32_t unit = y.Unit((first + t) / kSide);
        const uint32_t e = (first + t) % kSide;
        index[t] = unit * kSide + e;
        if constexpr (kAnywhere) {
          const uint32_t run = p.y.length.Quotient(unit);
          const uint32_t column = (unit - run * p.y.length.divisor) * kSide + e;
          index[t] = run * p.y_length +
                     (column < p.y_length ? column : p.y_length - 1);
        }
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
        position[t] = Padded(kSlot, position[t] * kSlot) / kSlot;
      }
#pragma unroll
      for (int t = 0; t < kTogether; t += 2) {
        pair[(first + t) / 2] = position[t] | position[t + 1] << 16;
      }
    }
  }
};

// To unit threadIdx.x + k * kThreads of shared memory in x's order. A vector
// never straddles a row of banks, so its padding is uniform; it is only as
// aligned as the pad.
template <int kElement, int kThreads, int kVector>
__device__ inline void StorePadded(char* shared, int k,
                                   const Packet<kVector>& held) {
  char* to = shared;
  if constexpr (InLargeBlocks(kElement, kThreads)) {  // nothing is carried
    to += Padded(kElement, threadIdx.x * kVector) +
          Padded(kElement, k * kThreads * kVector);
  } else {
    to += Padded(kElement, (threadIdx.x + k * kThreads) * kVector);
  }
  constexpr int kPad = kElement < 4 ? 4 : kElement;
  constexpr int kPart = kVector < kPad ? kVector : kPad;
#pragma unroll
  for (int part = 0; part < kVector / kPart; ++part) {
    Packet<kPart> piece;
#pragma unroll
    for (int w = 0; w < piece.kWords; ++w) {
      piece.word[w] = held.word[part * piece.kWords + w];
    }
    StoreShared<kPart>(to + part * kPart, piece);
  }
}

// 12 bytes of triples to their slots, of which the last bytes are anything.
template <int kElement>
__device__ inline Packet<16> ToSlots(const Packet<12>& in) {
  const uint32_t a = in.word[0], b = in.word[1], c = in.word[2];
  if constexpr (kElement == 3) {
    return {{a, __byte_perm(a, b, 0x6543), __byte_perm(b, c, 0x5432), c >> 8}};
  } else {
    return {{a, b, __byte_perm(b, c, 0x5432), c >> 16}};
  }
}

template <int kElement>
__device__ inline Packet<12> FromSlots(const Packet<16>& in) {
  const uint32_t a = in.word[0], b = in.word[1], c = in.word[2], d = in.word[3];
  if constexpr (kElement == 3) {
    return {{__byte_perm(a, b, 0x4210), __byte_perm(b, c, 0x5421),
             __byte_perm(c, d, 0x6542)}};
  } else {
    return {{a, __byte_perm(b, c, 0x5410), __byte_perm(c, d, 0x5432)}};
  }
}

// From shared memory, what stands at places `first` and after.
template <int kElement, int kVector, int kCount>
__device__ inline Packet<kVector> Gather(const char* shared,
                                         const Places<kElement, kCount>& places,
                                         int first) {
  constexpr int kSlot = PackedSlot(kElement);
  Packet<kVector / kElement * kSlot> out = {};
#pragma unroll
  for (int e = 0; e < kVector / kElement; ++e) {
    const auto element = LoadShared<kSlot>(shared + places[first + e] * kSlot);
    const int at = e * kSlot;  // byte of the vector
    if constexpr (kSlot < 4) {
      out.word[at / 4] |= element.word[0] << (at % 4 * 8);
    } else {
#pragma unroll
      for (int w = 0; w < kSlot / 4; ++w) {
        out.word[at / 4 + w] = element.word[w];
      }
    }
  }
  if constexpr (IsTriple(kElement)) {
    return FromSlots<kElement>(out);
  } else {
    return out;
  }
}

// Shared memory to runs of y, kVector bytes per store.
template <int kElement, int kThreads, int kVector, int kShare, typename Offset,
          int kCount>
__device__ inline void StoreRuns(
    char* y, const Accesses<kThreads, kVector, kShare, Offset>& at,
    const char* shared, const Places<kElement, kCount>& places) {
  // As many as 8 registers hold.
  constexpr int kMost = kVector == 16 ? 2 : 4;
  constexpr int kTogether = at.kCount < kMost ? at.kCount : kMost;
#pragma unroll
  for (int first = 0; first < at.kCount; first += kTogether) {
    if (first * kThreads >= at.units) return;  // the whole block
    Packet<kVector> out[kTogether];
#pragma unroll
    for (int h = 0; h < kTogether; ++h) {
      out[h] = Gather<kElement, kVector>(shared, places,
                                         (first + h) * (kVector / kElement));
    }
#pragma unroll
    for (int h = 0; h < kTogether; ++h) {
      StoreStreaming<kVector>(y + at.at[first + h], out[h]);
    }
  }
}

// The same in patches: the words of x that hold bytes of four words of y.
template <int kThreads, int kShare, typename Offset, int kCount>
__device__ inline void StorePatches(
    const PackedParams& p, char* y,
    const Accesses<kThreads, 4, kShare, Offset>& at, const char* shared,
    const Places<1, kCount>& places) {
#pragma unroll
  for (int k = 0; k < at.kCount; ++k) {
    if (k * kThreads >= at.units) return;  // the whole block
    uint32_t in[4], out[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      in[r] = LoadShared<4>(shared + places[4 * k + r]).word[0];
    }
    TransposeBytes(in, out);
    char* to = y + at.at[k];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      StoreStreaming<4>(to + r * p.patch_step, {{out[r]}});
    }
  }
}

// The same for runs that begin anywhere: the tile is put into y's order in
// shared memory, of whose words vectors of y are made. The bytes at the ends of
// a run are stored by themselves, by a warp.
template <int kElement, int kThreads, int kBytes, int kShare, typename Offset,
          int kCount>
__device__ inline void StoreAnywhere(
    const PackedParams& p, char* y,
    const Accesses<kThreads, kBytes, kShare, Offset>& at, const int64_t* runs,
    char* shared, const Places<kElement, kCount>& places) {
  constexpr int kUnits = at.kCount;
  const int bytes = static_cast<int>(p.y_length) * kElement;
  const int pitch = static_cast<int>(p.y.length.divisor) * kBytes;
  Packet<kBytes> held[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    held[k] = Gather<kElement, kBytes>(shared, places, k * (kBytes / kElement));
  }
  __syncthreads();  // all have what they need
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t unit = threadIdx.x + k * kThreads;
    if (unit >= at.units) continue;
    if constexpr (kBytes == 16) {
      StoreShared<16>(shared + unit * 16, held[k]);
    } else {
#pragma unroll
      for (int w = 0; w < kBytes / 4; ++w) {
        StoreShared<4>(shared + unit * kBytes + 4 * w, {{held[k].word[w]}});
      }
    }
  }
  __syncthreads();  // y's order is here
#pragma unroll
  for (int k = 0; k < kShare / 16; ++k) {
    const uint32_t vector = threadIdx.x + k * kThreads;
    const uint32_t run = p.y_vectors.Quotient(vector);
    if (run >= p.y.count) break;
    char* to = y + runs[run];
    const int first =
        -static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to)) & 15;
    const int byte =
        first + static_cast<int>(vector - run * p.y_vectors.divisor) * 16;
    if (byte + 16 <= bytes) {
      const char* from = shared + run * pitch + (byte & ~3);
      // A fourth word after the first, or none.
      const int fifth = byte % 4 == 0 ? 12 : 16;
      Packet<16> out;
      uint32_t low = LoadShared<4>(from).word[0];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t high =
            LoadShared<4>(from + (w < 3 ? 4 * w + 4 : fifth)).word[0];
        out.word[w] = __funnelshift_r(low, high, byte * 8);
        low = high;
      }
      StoreGlobal<16>(to + byte, out);
    }
  }
  // A lane stores one byte, or none: of the first 16 of a run if more than
  // `beside` are before its first vector, of the last 16 if more are after its
  // last.
  const int lane = threadIdx.x % 32;
  const bool head = lane < 16;
  const int byte = head ? lane : bytes - 32 + lane;
  const bool inside = byte >= 0 && byte < bytes;
  const int beside = !inside ? 16 : head ? lane : 31 - lane;
#pragma unroll 2
  for (uint32_t run = threadIdx.x / 32; run < p.y.count; run += kThreads / 32) {
    char* to = y + runs[run];
    const auto begin = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to));
    if (static_cast<int>((head ? -begin : begin + bytes) & 15) > beside) {
      StoreGlobal<1>(to + byte, LoadShared<1>(shared + run * pitch + byte));
    }
  }
}

// kX and kY are bytes per access, 0 where runs begin anywhere.
template <int kElement, int kThreads, int kX, int kY, typename Offset>
__device__ inline void MoveTiles(const PackedParams& p,
                                 const char* __restrict__ x,
                                 char* __restrict__ y) {
  constexpr bool kPatches = InPatches(kElement, kThreads);
  constexpr int kShare = PackedShare(kElement, kThreads);
  constexpr int kLoad = PackedAccess(kElement, kX);
  char* shared = SharedMemory();
  const Accesses<kThreads, kLoad, kShare, Offset> from(p.x);
  std::conditional_t<kX == 0, Around<kLoad>, Packet<kLoad>> held[from.kCount];
  int64_t y_offset;
  const auto fetch = [&](uint32_t tile) {
    int64_t x_offset;
    p.walk.Locate(tile, &x_offset, &y_offset);
    const char *corner = x + x_offset, *x_end = x + p.size;
    if constexpr (kX > 0) {
#pragma unroll
      for (int k = 0; k < from.kCount; ++k) {
        held[k] = LoadGlobal<kX>(corner + from.at[k]);
      }
    } else if (corner - (reinterpret_cast<uintptr_t>(corner) & 3) >= x &&
               corner + p.reach + 20 <= x_end) {
#pragma unroll
      for (int k = 0; k < from.kCount; ++k) {
        held[k] = LoadAround<kLoad>(corner + from.at[k]);
      }
    } else {  // words at an end of x are not all there
#pragma unroll
      for (int k = 0; k < from.kCount; ++k) {
        held[k] = LoadBytes<kLoad>(corner + from.at[k], x_end);
      }
    }
  };
  fetch(blockIdx.x);
  // A patch has 16 bytes, and as many places as an access of 4.
  constexpr int kStored = kPatches ? kShare / 4 : kShare;
  const Accesses<kThreads, PackedAccess(kElement, kY), kStored, Offset> to(p.y);
  Places<kElement, kStored / kElement> places;
  places.template Find<kY == 0>(p, to);
  auto* y_runs =
      reinterpret_cast<int64_t*>(shared + PackedBytes(kElement, p.elements));
  if constexpr (kY == 0) {
    for (uint32_t run = threadIdx.x; run < p.y.count; run += kThreads) {
      y_runs[run] = p.y.Offset(run);
    }
  }
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
#pragma unroll
    for (int k = 0; k < from.kCount; ++k) {
      const uint32_t unit = threadIdx.x + k * kThreads;
      if (unit >= from.units) continue;
      if constexpr (IsTriple(kElement)) {
        StorePadded<PackedSlot(kElement), kThreads>(
            shared, k, ToSlots<kElement>(held[k].Join()));
      } else if constexpr (kX == 0) {
        StorePadded<kElement, kThreads>(shared, k, held[k].Join());
      } else {
        StorePadded<kElement, kThreads>(shared, k, held[k]);
      }
    }
    __syncthreads();  // the tile is here
    char* corner = y + y_offset;
    if constexpr (InLargeBlocks(kElement, kThreads)) places.Keep();
    if (tile + gridDim.x < p.tiles) fetch(tile + gridDim.x);
    if constexpr (kPatches) {
      StorePatches(p, corner, to, shared, places);
    } else if constexpr (kY > 0) {
      StoreRuns<kElement>(corner, to, shared, places);
    } else {
      StoreAnywhere<kElement>(p, corner, to, y_runs, shared, places);
    }
    __syncthreads();  // the tile has left
  }
}

// Launch: 1-D, one wave of blocks at most; block b moves tiles b, b + grid,
// b + 2 grid, ... While one is gathered, the loads of the next are on their
// way. All tiles are whole: the last along an axis is pulled back over its
// neighbour, and both write the same bytes. Offset holds that of any byte of a
// tile.
// clang-format off
template <int kElement, int kThreads, typename Offset>
__global__ __launch_bounds__(kThreads, kPackedBounds<kThreads, Offset>)
void PackedKernel(const __grid_constant__ PackedParams p,
                  const char* __restrict__ x, char* __restrict__ y) {
  // clang-format on
  if constexpr (IsTriple(kElement)) {
    MoveTiles<kElement, kThreads, 0, 0, Offset>(p, x, y);
  } else {
    constexpr int kNarrow = kElement < 4 ? 4 : kElement;
    const auto move = [&]<int kX>(std::integral_constant<int, kX>) {
      if constexpr (InPatches(kElement, kThreads)) {
        MoveTiles<kElement, kThreads, kX, 4, Offset>(p, x, y);
      } else if (p.y.vector == 16) {
        MoveTiles<kElement, kThreads, kX, 16, Offset>(p, x, y);
      } else if (p.y.vector == kNarrow) {
        MoveTiles<kElement, kThreads, kX, kNarrow, Offset>(p, x, y);
      } else if constexpr (kElement < 4) {
        MoveTiles<kElement, kThreads, kX, 0, Offset>(p, x, y);
      }
    };
    if (p.x.vector == 16) {
      move(std::integral_constant<int, 16>());
    } else if constexpr (InPatches(kElement, kThreads)) {
      if (p.x.vector == 8) {
        move(std::integral_constant<int, 8>());
      } else {
        move(std::integral_constant<int, 0>());
      }
    } else if (p.x.vector == kNarrow) {
      move(std::integral_constant<int, kNarrow>());
    } else if constexpr (kElement < 4) {
      move(std::integral_constant<int, 0>());
    }
  }
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
