// SPDX-License-Identifier: Apache-2.0
//
// From a plan to blocks: which function, which axes in a block, which loops.
#include <algorithm>
#include <numeric>

#include "core/arithmetic.h"
#include "cpu/permute/permute.h"
#include "cpu/permute/shuffle.h"

namespace jax_layout {
namespace {

// Wanted bytes of a block along y (a column) and along x (a row).
constexpr int64_t kColumnBytes = 256;
constexpr int64_t kRowBytes = 2048;
// A stage pays for longer columns: their ragged ends are a smaller part. The
// whole block must fit.
constexpr int64_t kStagedColumnBytes = 1024;
constexpr int64_t kStagedBytes = 128 << 10;
// Of a block whose columns would compete for a few sets of a cache. They leave
// a stage, which the first-level cache holds, one after the other.
constexpr int64_t kLeastCrowdedBytes = 512;
constexpr int64_t kCrowdedColumnBytes = 1024;
constexpr int64_t kCrowdedBytes = 32 << 10;
// Chunks on the shorter side of a block, and these times their bytes, from
// which a masked tile is faster than a program; of blocks of single bytes,
// larger ones than these alone, as to begin a block takes time, too.
constexpr int64_t kLeastTiled = 4;
constexpr int64_t kLeastTiledWindows = 64;
constexpr int64_t kSmallBlockBytes = 384;
// Of a block of chunks that are copied one by one.
constexpr int64_t kCopiedColumnBytes = 4096;
constexpr int64_t kCopiedRowBytes = 4096;
// Large chunks are copied in pieces, so that threads can share one.
constexpr int64_t kPieceBytes = 64 << 10;
// Work worth waking another thread for, which takes about 20 us.
constexpr int64_t kTaskBytes = 256 << 10;

// Whether of so many lines, one every `distance` bytes, a set of a cache would
// get more than `most`.
bool AreCrowded(int64_t lines, int64_t distance, int64_t sets, int64_t most) {
  return distance % 64 == 0 &&
         lines > most * (sets / std::gcd(distance / 64, sets));
}

// One side of a block: the innermost axes of y (the rows) or of x (the
// columns), as many as reach `target` chunks; the last may be taken in part.
struct Side {
  BlockLoop::Part part;
  int64_t target = 1;
  std::vector<int> order;  // dims, innermost first
  std::vector<int> dims;   // of these, the ones in the block
  int64_t count = 1;
  bool done = false;

  explicit Side(BlockLoop::Part p) : part(p) {}
};

class Chooser {
 public:
  Chooser(const PermutePlan& plan, const PermuteFunctions& functions,
          PermuteKernel* kernel)
      : plan_(plan),
        functions_(functions),
        kernel_(*kernel),
        take_(plan.rank, 1),
        rows_(BlockLoop::kRows),
        cols_(BlockLoop::kCols) {
    if (plan.rank == 0) return;
    // Tiles write whole lines of y if its columns begin on one.
    const int64_t column = plan.dims[plan.rank - 1].extent * plan.chunk;
    direct_ = IsTile() ? functions.vector_bytes == 64 && column % 64 == 0
                       : plan.chunk % 64 == 0 || plan.chunk >= 1024;
    for (int d = plan.rank - 1; d >= 0; --d) rows_.order.push_back(d);
    cols_.order = rows_.order;
    std::sort(cols_.order.begin(), cols_.order.end(), [&](int a, int b) {
      return plan.dims[a].x_stride < plan.dims[b].x_stride;
    });
    crowded_ = column >= kLeastCrowdedBytes && AreColumnsCrowded();
    int64_t column_bytes = kColumnBytes;
    int64_t row_bytes = kRowBytes;
    if (crowded_) {
      column_bytes = kCrowdedColumnBytes;
      row_bytes = kCrowdedBytes / column_bytes * plan.chunk;
    } else if (plan.chunk >= 64) {
      column_bytes = kCopiedColumnBytes;
      row_bytes = kCopiedRowBytes;
    } else if (kernel_.stream && !direct_) {
      column_bytes = kStagedColumnBytes;
      row_bytes = kStagedBytes / column_bytes * plan.chunk;
    }
    rows_.target = std::max<int64_t>(1, column_bytes / plan.chunk);
    cols_.target = std::max<int64_t>(1, row_bytes / plan.chunk);
  }

  void Choose() {
    if (plan_.rank > 0) {
      while (!rows_.done || !cols_.done) {
        Side& side = rows_.done || (!cols_.done && cols_.count < rows_.count)
                         ? cols_
                         : rows_;
        Grow(&side);
      }
      if (ChooseShuffle()) return;
    }
    kernel_.rows = rows_.count;
    kernel_.cols = cols_.count;
    kernel_.x_offset = Offsets(rows_, &PermuteDim::x_stride);
    kernel_.y_offset = Offsets(cols_, &PermuteDim::y_stride);
    ChooseFunction();
    ChooseStage();
    ChooseLoops();
  }

 private:
  bool IsTile() const {
    return plan_.chunk <= 16 && (plan_.chunk & (plan_.chunk - 1)) == 0;
  }

  // The columns of a tile in the first-level cache, of which half lines have to
  // stay until the next strip of tiles; or those of a block in the second.
  bool AreColumnsCrowded() const {
    constexpr int64_t kSets = 64, kSetsOfSecond = 1024, kWays = 8;
    const PermuteDim& dim = plan_.dims[cols_.order[0]];
    const int64_t distance = dim.y_stride * plan_.chunk;
    const auto lines = [&](int64_t bytes) {
      return std::min(dim.extent, bytes / plan_.chunk);
    };
    const int64_t vector = functions_.vector_bytes;
    return IsTile() && !kernel_.stream &&
           (AreCrowded(lines(vector), distance, kSets,
                       vector < 64 ? 2 : kWays) ||
            AreCrowded(lines(kRowBytes), distance, kSetsOfSecond, kWays));
  }

  bool InBlock(const Side& side, int d) const {
    return std::find(side.dims.begin(), side.dims.end(), d) != side.dims.end();
  }

  // Takes the next axis, or finds that the side is done.
  void Grow(Side* side) {
    const size_t next = side->dims.size();
    const Side& other = side == &rows_ ? cols_ : rows_;
    side->done = next == side->order.size() || side->count >= side->target ||
                 InBlock(other, side->order[next]) ||
                 (next == 0 && side->order[0] == other.order[0]);
    if (side->done) return;
    const int d = side->order[next];
    const int64_t extent = plan_.dims[d].extent;
    int64_t take =
        std::min(extent, std::max<int64_t>(1, side->target / side->count));
    take = CeilDiv(extent, CeilDiv(extent, take));
    if (next == 0) {
      // Whole lines: the next block then starts on one as well.
      const int64_t line = std::max<int64_t>(1, 64 / plan_.chunk);
      take = std::min(extent, CeilDiv(take, line) * line);
    } else if (take == 1) {
      side->done = true;
      return;
    }
    take_[d] = take;
    side->dims.push_back(d);
    side->count *= take;
    side->done = take < extent;
  }

  // Bytes from the first chunk of a side to each, innermost axis fastest.
  std::vector<int64_t> Offsets(const Side& side,
                               int64_t PermuteDim::* stride) const {
    std::vector<int64_t> offsets = {0};
    for (int d : side.dims) {
      const size_t inner = offsets.size();
      for (int64_t i = 1; i < take_[d]; ++i) {
        for (size_t j = 0; j < inner; ++j) {
          offsets.push_back(offsets[j] +
                            i * plan_.dims[d].*stride * plan_.chunk);
        }
      }
    }
    return offsets;
  }

  void ChooseFunction() {
    if (plan_.chunk >= 64 || plan_.rank == 0) {
      kernel_.run_block = functions_.copy;
    } else if (IsTile()) {
      int log2 = 0;
      while (1 << log2 < plan_.chunk) ++log2;
      kernel_.run_block = functions_.transpose[log2];
    } else {
      const int wider = plan_.chunk > 8 ? 2 : plan_.chunk > 4 ? 1 : 0;
      kernel_.run_block = plan_.chunk < 16 ? functions_.packed[wider] : nullptr;
      if (!kernel_.run_block) kernel_.run_block = functions_.move;
    }
  }

  void ChooseStage() {
    const int64_t column = kernel_.rows * plan_.chunk;
    // Columns that follow each other in y leave the stage as one run.
    const bool whole =
        std::all_of(rows_.dims.begin(), rows_.dims.end(),
                    [&](int d) { return take_[d] == plan_.dims[d].extent; });
    const std::vector<int64_t>& y_offset = kernel_.y_offset;
    int64_t run = 1;
    while (whole && run < kernel_.cols &&
           y_offset[run] - y_offset[run - 1] == column) {
      ++run;
    }
    kernel_.run_cols = run;
    // Odd multiples of a line: columns do not compete for the same sets.
    const int64_t pitch = (CeilDiv(run * column, 64) | 1) * 64;
    kernel_.stage_offset.resize(kernel_.cols);
    for (int64_t j = 0; j < kernel_.cols; ++j) {
      kernel_.stage_offset[j] = j / run * pitch + j % run * column;
    }
    kernel_.staged = (crowded_ || (kernel_.stream && !direct_)) &&
                     run * column >= 256 &&
                     CeilDiv(kernel_.cols, run) * pitch <= kStageBytes;
    kernel_.stream &= direct_ || kernel_.staged;
  }

  void AddLoop(int d, BlockLoop::Part part, int64_t count) {
    const PermuteDim& dim = plan_.dims[d];
    const int64_t take = take_[d];
    if (take == dim.extent) return;
    const int64_t steps = CeilDiv(dim.extent, take);
    const int64_t left = dim.extent - (steps - 1) * take;
    kernel_.loops.push_back({steps, take * dim.x_stride * plan_.chunk,
                             take * dim.y_stride * plan_.chunk, part, count,
                             count / take * left});
  }

  void ChooseLoops() {
    if (plan_.chunk > kPieceBytes) {
      const int64_t pieces = CeilDiv(plan_.chunk, kPieceBytes);
      const int64_t piece = CeilDiv(CeilDiv(plan_.chunk, pieces), 4096) * 4096;
      const int64_t steps = CeilDiv(plan_.chunk, piece);
      kernel_.loops.push_back({steps, piece, piece, BlockLoop::kBytes, piece,
                               plan_.chunk - (steps - 1) * piece});
    }
    // Innermost, along x: the pages of x that a block has opened are used up
    // first. Then outwards through y.
    std::vector<int> order = rows_.order;
    if (cols_.dims.size() > 0) {
      int next = cols_.dims.back();
      if (take_[next] == plan_.dims[next].extent &&
          cols_.dims.size() < cols_.order.size()) {
        next = cols_.order[cols_.dims.size()];
      }
      std::rotate(order.begin(), std::find(order.begin(), order.end(), next),
                  std::find(order.begin(), order.end(), next) + 1);
    }
    for (int d : order) {
      if (InBlock(rows_, d)) {
        AddLoop(d, rows_.part, rows_.count);
      } else if (InBlock(cols_, d)) {
        AddLoop(d, cols_.part, cols_.count);
      } else {
        AddLoop(d, BlockLoop::kNothing, 0);
      }
    }
  }

  // Of a program there are as many windows in a vector as vectors in a small
  // block; a tile has the fewer rows the larger chunks are.
  bool IsSmall(int64_t block) const {
    return block * block <= kSmallBlockBytes * kSmallBlockBytes / plan_.chunk;
  }

  // Whether a program beats tiles that would be partly empty: of the program, a
  // vector takes as many windows as the shorter side has chunks.
  bool IsShuffled() const {
    const int64_t column = rows_.count * plan_.chunk;
    const int64_t row = cols_.count * plan_.chunk;
    if (!IsTile()) return std::min(column, row) < functions_.shuffle_bytes / 2;
    // Without masks, what is less than a tile moves chunk by chunk.
    if (functions_.vector_bytes < 64) return column <= 8 || row < 16;
    const int64_t least = std::min(rows_.count, cols_.count);
    return least < kLeastTiled ||
           least * std::min(column, row) < kLeastTiledWindows ||
           IsSmall(rows_.count * row);
  }

  bool ChooseShuffle() {
    if (!IsShuffled()) return false;
    std::vector<int64_t> take;
    int split = -1;
    if (!ShuffleExtents(plan_, rows_.order, cols_.order,
                        functions_.shuffle_bytes, &take, &split)) {
      return false;
    }
    take_ = take;
    kernel_.program = MakeShuffleProgram(plan_, rows_.order, cols_.order, take,
                                         functions_.shuffle_bytes);
    const int64_t left = plan_.dims[split].extent % take[split];
    if (left > 0) {
      take[split] = left;
      kernel_.last_program = MakeShuffleProgram(plan_, rows_.order, cols_.order,
                                                take, functions_.shuffle_bytes);
    }
    AddLoop(split, BlockLoop::kRows, take_[split]);
    for (int d : rows_.order) {
      if (d != split) AddLoop(d, BlockLoop::kNothing, 0);
    }
    return true;
  }

  const PermutePlan& plan_;
  const PermuteFunctions& functions_;
  PermuteKernel& kernel_;
  std::vector<int64_t> take_;  // of each dim, how much is in a block
  Side rows_, cols_;
  bool direct_ = true;    // no stage needed for non-temporal stores
  bool crowded_ = false;  // columns of y lie in the same few sets of a cache
};

const Kernels<const PermuteFunctions*> kKernels(
    "permute", {
#ifdef __x86_64__
                   {Isa::kAvx512, &kPermuteAvx512, HasVbmi},
                   {Isa::kAvx2, &kPermuteAvx2},
#elif defined(__aarch64__)
                   {Isa::kNeon, &kPermuteNeon},
#endif
                   {Isa::kPortable, &kPermutePortable}});

}  // namespace

const PermuteFunctions& FunctionsOf(Isa isa) { return *kKernels.At(isa); }

PermuteKernel ChoosePermuteKernel(const PermutePlan& plan, Isa isa,
                                  int64_t stream) {
  PermuteKernel kernel;
  kernel.plan = plan;
  kernel.functions = kKernels.Take(isa);
  kernel.bytes = plan.chunk;
  if (plan.size == 0) return kernel;
  kernel.stream = plan.size > stream && kernel.functions->vector_bytes > 16;
  Chooser(plan, *kernel.functions, &kernel).Choose();
  for (const BlockLoop& loop : kernel.loops) kernel.num_blocks *= loop.count;
  kernel.blocks_per_task = std::max<int64_t>(
      1, kTaskBytes / std::max<int64_t>(1, plan.size / kernel.num_blocks));
  return kernel;
}

}  // namespace jax_layout
