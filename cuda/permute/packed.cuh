// SPDX-License-Identifier: Apache-2.0
//
// Everything else: chunks that are no vector, tiny axes (3 channels, a few
// heads), and reversals of many axes. A tile is a box over as many leading
// axes of x and of y as make long contiguous runs in both; shared memory holds
// it in x's order, and each thread knows where in it its part of y's is.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_

#include <algorithm>
#include <array>

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

inline constexpr int kPackedThreads = 256;
// Bytes of a tile that a thread moves, at most: 32 elements.
__host__ __device__ constexpr int PackedShare(int element) {
  return element == 1 ? 32 : 64;
}

// Bytes of an access, where runs that begin anywhere are said to have less than
// a word.
__host__ __device__ constexpr int PackedAccess(int vector) {
  return vector < 4 ? 16 : vector;
}

// Blocks on a multiprocessor, by its registers: one wave of them finds its
// places once for many tiles.
template <int kElement>
inline constexpr int kPackedResident = 4;
// Blackwell's assembler wants more registers than a fourth block leaves, and of
// halves more than a second.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <int kElement>
inline constexpr int kPackedBounds = kElement == 2 ? 1 : 2;
#else
template <int kElement>
inline constexpr int kPackedBounds = kPackedResident<kElement>;
#endif

// Shared memory is padded by one bank per 32 banks and one more per 32 x 32,
// which spreads any power-of-two stride: with word w at w + w/32 + w/1024, 32
// words a stride of 2^k apart fall in 32 banks. Wider elements pad by
// themselves. `position` counts bytes.
__host__ __device__ constexpr uint32_t Padded(uint32_t element,
                                              uint32_t position) {
  const uint32_t pad = element < 4 ? 4 : element;
  const uint32_t row = position / 128;
  return position + (row + row / (128 / pad)) * pad;
}

// The parts of a block's shared memory, in order.
struct PackedShared {
  uint32_t x_runs, y_runs, bytes;  // offsets; the elements are at 0

  __host__ __device__ PackedShared(int element, uint32_t elements,
                                   uint32_t x_run_count, uint32_t y_run_count) {
    x_runs = (Padded(element, elements * element) + 15) / 16 * 16;
    y_runs = x_runs + x_run_count * 8;
    bytes = y_runs + y_run_count * 8;
  }
};

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
// in which it does: the same ones of every tile, so registers hold them.
template <int kElement>
struct Places {
  static constexpr int kCount = PackedShare(kElement) / kElement;
  static constexpr int kTogether = kElement == 1 ? 8 : 4;
  uint32_t pair[(kCount + 1) / 2];  // of 16 bits each

  __device__ uint32_t operator[](int k) const {
    return k % 2 == 0 ? pair[k / 2] & 0xffff : pair[k / 2] >> 16;
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
        pair[(first + t) / 2] = position[t] | position[t + 1] << 16;
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
#pragma unroll
  for (int e = 0; e < kVector / kElement; ++e) {
    const uint32_t place = places[first + e];
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

// Chooses the box and everything above.
class PackedPlanner {
 public:
  PackedPlanner(const PermutePlan& plan, int element, int alignment)
      : element_(element), alignment_(alignment), size_(plan.size) {
    // y's axes, innermost first, in elements. A chunk of several elements is
    // one more axis, innermost on both sides.
    const int64_t per_chunk = plan.chunk / element;
    if (per_chunk > 1) axes_[rank_++] = {per_chunk, 1, 1};
    for (int d = plan.rank - 1; d >= 0; --d) {
      axes_[rank_++] = {plan.dims[d].extent, plan.dims[d].x_stride * per_chunk,
                        plan.dims[d].y_stride * per_chunk};
    }
    for (int d = 0; d < rank_; ++d) y_order_[d] = x_order_[d] = d;
    std::sort(x_order_, x_order_ + rank_, [this](int a, int b) {
      return axes_[a].x_stride < axes_[b].x_stride;
    });
    // Less where launching dominates.
    max_elements_ = kPackedThreads * PackedShare(element) / element /
                    (plan.size < kSmallBytes ? 4 : 1);
  }

  PackedParams Plan() {
    ChooseBox();
    PackedParams p = {};
    p.element = element_;
    int64_t tiles = 1;
    for (int d = 0; d < rank_; ++d) {
      const int64_t count = Count(d);
      if (tiles > kMaxCount32 / count) return p;  // p.tiles == 0
      tiles *= count;
    }
    p.elements = static_cast<uint32_t>(std::max(Held(true), Held(false)));
    p.tiles = static_cast<uint32_t>(tiles);
    for (int d = 0; d < rank_; ++d) {
      if (Count(d) == 1) continue;
      p.walk.Append(axes_[d].extent, box_[d], axes_[d].x_stride * element_,
                    axes_[d].y_stride * element_);
    }

    // x's order of the box: what is left after the first axis that the box
    // does not span counts runs, and the same for y.
    int64_t position[kMaxRank + 1];
    int64_t stride = 1;
    bool inside = true;  // the run
    for (int k = 0; k < rank_; ++k) {
      const int d = x_order_[k];
      position[d] = stride;
      stride *= box_[d];
      p.reach += (box_[d] - 1) * axes_[d].x_stride * element_;
      if (inside && box_[d] < axes_[d].extent) stride = Pitch(true);
      inside &= box_[d] == axes_[d].extent;
    }
    p.size = size_;
    for (int k = 0; k < rank_; ++k) {
      if (box_[k] == 1) continue;
      const auto extent = static_cast<uint32_t>(box_[k]);
      p.order[p.rank++] = {extent, UINT32_MAX / extent + 1,
                           static_cast<uint32_t>(position[k])};
    }
    if (p.rank > 0) p.last_stride = p.order[p.rank - 1].stride;
    p.x_vector =
        PlanRuns(true, p.x_run_dims, &p.x_run_rank, &p.x_runs, &p.x_run);
    p.y_vector =
        PlanRuns(false, p.y_run_dims, &p.y_run_rank, &p.y_runs, &p.y_run);
    p.y_length = static_cast<uint32_t>(RunLength(y_order_));
    p.shared_bytes = static_cast<int>(
        PackedShared(element_, p.elements, p.x_runs, p.y_runs).bytes);
    return p;
  }

 private:
  struct Axis {
    int64_t extent, x_stride, y_stride;  // elements
  };

  int64_t Count(int d) const {
    return (axes_[d].extent + box_[d] - 1) / box_[d];
  }

  // The smallest step along axis d that keeps to sectors on both sides, or to
  // vectors, or 1 if the axis ends elsewhere anyway.
  int64_t Granule(int d) const {
    for (const int64_t bytes : {kSector, int64_t{16}}) {
      int64_t granule = 1;
      for (int64_t stride : {axes_[d].x_stride, axes_[d].y_stride}) {
        while (granule * stride * element_ % bytes != 0) granule *= 2;
      }
      if (axes_[d].extent % granule == 0) return granule;
    }
    return 1;
  }

  // Extends the box along `order` until it holds runs of `run` elements.
  void Extend(const int* order, int64_t run) {
    int64_t have = 1;
    for (int k = 0; k < rank_ && have < run; ++k) {
      const int d = order[k];
      const int64_t extent = axes_[d].extent;
      const int64_t need = (run + have - 1) / have;
      int64_t step = extent;
      if (need < extent) {
        // Equal steps, so that the last one overlaps its neighbour little.
        const int64_t count = (extent + need - 1) / need;
        const int64_t granule = Granule(d);
        step = (extent + count - 1) / count;
        step = (step + granule - 1) / granule * granule;
      }
      box_[d] = std::max(box_[d], std::min(step, extent));
      have *= box_[d];
      if (box_[d] < extent) break;
    }
  }

  // The longest runs whose box still fits; then of one side those that cost
  // least.
  void ChooseBox() {
    int64_t run = max_elements_;
    while (!Fits(run, run)) run -= (run + 15) / 16;
    auto best = box_;
    double least = Cost();
    for (const bool x : {true, false}) {
      for (int64_t longer = run; longer <= max_elements_;
           longer += (longer + 15) / 16) {
        if (!Fits(x ? longer : run, x ? run : longer)) break;
        if (Cost() >= least) continue;
        best = box_;
        least = Cost();
      }
    }
    box_ = best;
  }

  bool Fits(int64_t x_run, int64_t y_run) {
    box_.fill(1);
    Extend(x_order_, x_run);
    Extend(y_order_, y_run);
    int64_t elements = 1;
    for (int d = 0; d < rank_; ++d) {
      if (box_[d] > max_elements_ / elements) return false;
      elements *= box_[d];
    }
    // Short runs would need large tables of them: 8 bytes each.
    const int64_t runs =
        elements / RunLength(x_order_) + elements / RunLength(y_order_);
    return runs <= 2048 && Held(true) <= max_elements_ &&
           Held(false) <= max_elements_;
  }

  const int* Order(bool x) const { return x ? x_order_ : y_order_; }

  // Bytes from one position of axis d to the next.
  int64_t Stride(bool x, int d) const {
    return (x ? axes_[d].x_stride : axes_[d].y_stride) * element_;
  }

  // Bytes per access: all that decides an address must be a multiple.
  int Vector(bool x) const {
    const int64_t length = RunLength(Order(x));
    int64_t bits = alignment_ | length * element_, inside = 1;
    for (int k = 0; k < rank_; ++k) {
      const int d = Order(x)[k];
      const int64_t bytes = Stride(x, d);
      if (Count(d) > 1) {
        bits |= box_[d] * bytes | (axes_[d].extent - box_[d]) * bytes;
      }
      inside *= box_[d];
      if (inside > length && box_[d] > 1) bits |= bytes;
    }
    const int64_t aligned = bits & -bits;
    return aligned >= 16 ? 16 : element_ < 4 && aligned >= 4 ? 4 : element_;
  }

  // Elements from a run to the next in shared memory: where runs begin
  // anywhere, they fill whole vectors.
  int64_t Pitch(bool x) const {
    const int64_t length = RunLength(Order(x));
    const int64_t vector = Vector(x) < 4 ? 16 / element_ : 1;
    return (length + vector - 1) / vector * vector;
  }

  // Elements of shared memory that the box takes in an order.
  int64_t Held(bool x) const {
    int64_t elements = 1;
    for (int d = 0; d < rank_; ++d) elements *= box_[d];
    return elements / RunLength(Order(x)) * Pitch(x);
  }

  // Bytes of sectors for each byte that is moved, and the time in which a tile
  // waits for memory, which could move some 2 KB.
  double Cost() const {
    double elements = element_, sectors = 0;
    for (int d = 0; d < rank_; ++d) elements *= static_cast<double>(box_[d]);
    for (const bool x : {true, false}) {
      const int64_t length = RunLength(Order(x)) * element_;
      int64_t bits = length | kSector;
      for (int d = 0; d < rank_; ++d) {
        if (Stride(x, d) >= length) bits |= Stride(x, d);
      }
      const int64_t beside = kSector - (bits & -bits);
      sectors += static_cast<double>(beside) / static_cast<double>(length);
    }
    return 2 + sectors + 2048 / elements;
  }

  int64_t RunLength(const int* order) const {
    int64_t length = 1;
    for (int k = 0; k < rank_; ++k) {
      length *= box_[order[k]];
      if (box_[order[k]] < axes_[order[k]].extent) break;
    }
    return length;
  }

  // The runs on one side; returns the bytes per access.
  int PlanRuns(bool x, PackedParams::Run* dims, int* rank, uint32_t* runs,
               FastDivider<uint32_t>* accesses) const {
    const int64_t length = RunLength(Order(x));
    int64_t inside = 1;
    *runs = 1;
    for (int k = 0; k < rank_; ++k) {
      const int d = Order(x)[k];
      inside *= box_[d];
      if (inside <= length || box_[d] == 1) continue;
      dims[(*rank)++] = {FastDivider<uint32_t>(box_[d]), Stride(x, d)};
      *runs *= static_cast<uint32_t>(box_[d]);
    }
    const int vector = Vector(x);
    *accesses = FastDivider<uint32_t>(
        static_cast<uint32_t>(Pitch(x) * element_ / PackedAccess(vector)));
    return vector;
  }

  static constexpr int64_t kSector = 32;  // bytes

  int element_;
  int64_t alignment_, size_;
  int64_t max_elements_;
  int rank_ = 0;
  Axis axes_[kMaxRank + 1];
  int x_order_[kMaxRank + 1], y_order_[kMaxRank + 1];
  std::array<int64_t, kMaxRank + 1> box_;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PACKED_CUH_
