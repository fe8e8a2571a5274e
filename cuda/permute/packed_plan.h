// SPDX-License-Identifier: Apache-2.0
//
// Which box of a permute a tile of PackedKernel (packed.cuh) is, and how it
// lies in shared memory.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PACKED_PLAN_H_
#define JAX_LAYOUT_CUDA_PERMUTE_PACKED_PLAN_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/permute/params.h"

namespace jax_layout {

// Three bytes or halves that stay together, whose runs begin anywhere, are one
// element.
__host__ __device__ constexpr bool IsTriple(int element) {
  return element == 3 || element == 6;
}
// Bytes of shared memory that an element takes.
__host__ __device__ constexpr int PackedSlot(int element) {
  return IsTriple(element) ? element / 3 * 4 : element;
}

// Places of single bytes take 16 registers.
__host__ __device__ constexpr int PackedThreads(int element) {
  return IsTriple(element) ? 128 : element == 1 ? 192 : 256;
}
// For large boxes of single bytes: offsets of 32 bits alone.
inline constexpr int kPackedLargeThreads = 512;
// For those that move in patches: 4 x 4 bytes, words in x and in y.
inline constexpr int kPackedPatchThreads = 256;
__host__ __device__ constexpr bool InPatches(int element, int threads) {
  return element == 1 && threads == kPackedPatchThreads;
}
__host__ __device__ constexpr bool InLargeBlocks(int element, int threads) {
  return element == 1 && threads != PackedThreads(element);
}
// Large boxes make two waves of an H100, or more.
inline constexpr uint32_t kPackedLargeTiles = 512;
// Bytes of a tile that a thread moves, at most.
__host__ __device__ constexpr int PackedShare(int element, int threads) {
  return IsTriple(element) ? 48 : InPatches(element, threads) ? 64 : 32;
}

// Bytes of an access, where runs that begin anywhere are said to have less than
// a word.
__host__ __device__ constexpr int PackedAccess(int element, int vector) {
  return IsTriple(element) ? 12 : vector < 4 ? 16 : vector;
}

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

// Of shared memory that elements take: after them, where y's runs begin, if
// that is anywhere.
__host__ __device__ constexpr uint32_t PackedBytes(int element,
                                                   uint32_t elements) {
  const int slot = PackedSlot(element);
  return (Padded(slot, elements * slot) + 15) / 16 * 16;
}

// Chooses the box, and all that PackedParams says.
class PackedPlanner {
 public:
  PackedPlanner(const PermutePlan& plan, int element, int alignment,
                int threads)
      : element_(element),
        alignment_(alignment),
        threads_(threads),
        size_(plan.size) {
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
    max_elements_ = threads * PackedShare(element, threads) / element /
                    (plan.size < kSmallBytes ? 4 : 1);
  }

  PackedParams Plan() {
    ChooseBox();
    PackedParams p = {};
    if (InPatches(element_, threads_)) {
      if (!HasPatches()) return p;
      patched_ = x_order_[0];
      p.patch_step = Stride(false, patched_);
    }
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
    int64_t y_reach = 0;
    for (int k = 0; k < rank_; ++k) {
      const int d = x_order_[k];
      position[d] = stride;
      stride *= box_[d];
      p.reach += (box_[d] - 1) * Stride(true, d);
      y_reach += (box_[d] - 1) * Stride(false, d);
      if (inside && box_[d] < axes_[d].extent) stride = Pitch(true);
      inside &= box_[d] == axes_[d].extent;
    }
    p.threads = threads_;
    p.size = size_;
    p.wide = std::max(p.reach, y_reach) + 16 > UINT32_MAX;
    for (int k = 0; k < rank_; ++k) {
      const auto extent = static_cast<uint32_t>(box_[k] / Step(k));
      if (extent == 1) continue;
      p.order[p.rank++] = {extent, UINT32_MAX / extent + 1,
                           static_cast<uint32_t>(position[k] * Step(k))};
    }
    if (p.rank > 0) p.last_stride = p.order[p.rank - 1].stride;
    p.x = PlanRuns(true);
    p.y = PlanRuns(false);
    p.y_length = static_cast<uint32_t>(RunLength(y_order_));
    p.y_vectors =
        FastDivider<uint32_t>(std::max(1u, p.y_length * element_ / 16));
    p.shared_bytes = static_cast<int>(PackedBytes(element_, p.elements) +
                                      (p.y.vector < 4 ? p.y.count * 8 : 0));
    return p;
  }

  // Bytes of sectors for each byte of x, where boxes overlap more than once.
  double Traffic() const {
    double traffic = Sectors();
    for (int d = 0; d < rank_; ++d) {
      traffic *= static_cast<double>(Count(d) * box_[d]) /
                 static_cast<double>(axes_[d].extent);
    }
    return traffic;
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
    if (IsTriple(element_)) return 1;
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
    if (aligned >= 16) return 16;
    if (x && InPatches(element_, threads_)) return aligned == 8 ? 8 : 1;
    return element_ < 4 && aligned >= 4 ? 4 : element_;
  }

  // Whether x's innermost axis has whole words, of whose bytes each is in
  // another run of y, and those are whole words too.
  bool HasPatches() const {
    int64_t before = 1;
    for (int k = 0; y_order_[k] != x_order_[0]; ++k) {
      before *= box_[y_order_[k]];
    }
    return box_[x_order_[0]] % 4 == 0 && Vector(false) >= 4 &&
           before >= RunLength(y_order_);
  }

  // Positions of axis d that a thread moves at a time.
  int64_t Step(int d) const { return d == patched_ ? 4 : 1; }

  // Elements from a run to the next in shared memory: where runs begin
  // anywhere, they fill whole vectors.
  int64_t Pitch(bool x) const {
    const int64_t length = RunLength(Order(x));
    const int vector = Vector(x);
    const int64_t whole =
        vector < 4 ? PackedAccess(element_, vector) / element_ : 1;
    return (length + whole - 1) / whole * whole;
  }

  // Elements of shared memory that the box takes in an order.
  int64_t Held(bool x) const {
    int64_t elements = 1;
    for (int d = 0; d < rank_; ++d) elements *= box_[d];
    return elements / RunLength(Order(x)) * Pitch(x);
  }

  // Bytes of sectors for each byte of a tile, read and written.
  double Sectors() const {
    double sectors = 2;
    for (const bool x : {true, false}) {
      const int64_t length = RunLength(Order(x)) * element_;
      int64_t bits = length | kSector;
      for (int d = 0; d < rank_; ++d) {
        if (Stride(x, d) >= length) bits |= Stride(x, d);
      }
      const int64_t beside = kSector - (bits & -bits);
      sectors += static_cast<double>(beside) / static_cast<double>(length);
    }
    return sectors;
  }

  // These, and the time in which a tile waits for memory, which could move some
  // 2 KB.
  double Cost() const {
    double elements = element_;
    for (int d = 0; d < rank_; ++d) elements *= static_cast<double>(box_[d]);
    return Sectors() + 2048 / elements;
  }

  int64_t RunLength(const int* order) const {
    int64_t length = 1;
    for (int k = 0; k < rank_; ++k) {
      length *= box_[order[k]];
      if (box_[order[k]] < axes_[order[k]].extent) break;
    }
    return length;
  }

  PackedParams::Runs PlanRuns(bool x) const {
    const int64_t length = RunLength(Order(x));
    int64_t inside = 1;
    PackedParams::Runs runs = {};
    runs.count = 1;
    for (int k = 0; k < rank_; ++k) {
      const int d = Order(x)[k];
      inside *= box_[d];
      const int64_t step = x ? 1 : Step(d), extent = box_[d] / step;
      if (inside <= length || extent == 1) continue;
      runs.dims[runs.rank++] = {FastDivider<uint32_t>(extent),
                                step * Stride(x, d)};
      runs.count *= static_cast<uint32_t>(extent);
    }
    runs.vector = !x && patched_ >= 0 ? 4 : Vector(x);
    runs.length = FastDivider<uint32_t>(static_cast<uint32_t>(
        Pitch(x) * element_ / PackedAccess(element_, runs.vector)));
    return runs;
  }

  static constexpr int64_t kSector = 32;  // bytes

  int element_;
  int64_t alignment_;
  int threads_;
  int64_t size_;
  int64_t max_elements_;
  int rank_ = 0;
  int patched_ = -1;  // the axis along which patches have their rows
  Axis axes_[kMaxRank + 1];
  int x_order_[kMaxRank + 1], y_order_[kMaxRank + 1];
  std::array<int64_t, kMaxRank + 1> box_;
};

// A multiprocessor has room for fewer large boxes: they are for short runs of
// bytes, where longer ones touch a tenth fewer sectors.
inline PackedParams PlanPacked(const PermutePlan& plan, int element,
                               int alignment) {
  PackedPlanner planner(plan, element, alignment, PackedThreads(element));
  const PackedParams p = planner.Plan();
  if (IsTriple(static_cast<int>(plan.chunk)) && p.y.vector < 4) {
    const int triple = static_cast<int>(plan.chunk);
    const PackedParams triples =
        PackedPlanner(plan, triple, alignment, PackedThreads(triple)).Plan();
    if (triples.tiles > 0 && !triples.wide) return triples;
  }
  if (element > 1) return p;
  for (const int threads : {kPackedPatchThreads, kPackedLargeThreads}) {
    PackedPlanner large_planner(plan, element, alignment, threads);
    const PackedParams large = large_planner.Plan();
    if (large.tiles >= kPackedLargeTiles && !large.wide &&
        large_planner.Traffic() < 0.9 * planner.Traffic()) {
      return large;
    }
  }
  return p;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PACKED_PLAN_H_
