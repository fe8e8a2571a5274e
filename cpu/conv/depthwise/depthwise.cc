// SPDX-License-Identifier: Apache-2.0
//
// From a problem to tiles, one per task.
#include "cpu/conv/depthwise/depthwise.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/conv/depthwise/kernels.h"

namespace jax_layout {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLine = 64;

int64_t Itemsize(DType type) { return type == DType::kF32 ? 4 : 2; }

// --- What the problem is in terms of the kernels ---

bool IsFloat(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
}

// Whether channels are contiguous, all or those of a block.
bool IsLast(const ConvLayout& layout, int64_t channels) {
  return layout.block > 1 ? channels % layout.block == 0
                          : layout.strides[1] == 1 || channels == 1;
}

bool IsPlanes(const ConvLayout& layout, const std::array<int64_t, 3>& sizes) {
  return layout.block == 1 && (layout.strides[4] == 1 || sizes[2] == 1);
}

bool IsPlanes(const ConvProblem& p) {
  return IsPlanes(p.x, p.in) && IsPlanes(p.y, p.out);
}

// One channel may be either, and is better a plane.
bool IsLast(const ConvProblem& p) {
  return p.x.block == p.y.block && IsLast(p.x, p.in_channels) &&
         IsLast(p.y, p.in_channels) && !(p.in_channels == 1 && IsPlanes(p));
}

// What is read and what is written, but for the weight gradient, which reads
// both.
const ConvLayout& Read(const ConvProblem& p) {
  return p.pass == ConvPass::kInputGrad ? p.y : p.x;
}
const ConvLayout& Written(const ConvProblem& p) {
  return p.pass == ConvPass::kInputGrad ? p.x : p.y;
}

struct Axis {
  std::vector<DepthwiseAxis> phases;
  std::vector<std::vector<DepthwiseRun>> runs;
  int64_t most = 0;  // results of a phase
};

std::vector<DepthwiseRun> RunsOf(const DepthwiseAxis& a) {
  std::vector<DepthwiseRun> runs;
  for (int64_t q = 0; q < a.count; ++q) {
    const int64_t at = a.offset + q * a.step;  // of the first tap
    const int64_t lo = std::min(at < 0 ? CeilDiv(-at, a.spacing) : 0, a.taps);
    const int64_t hi = std::max(
        lo,
        std::min(at < a.size ? CeilDiv(a.size - at, a.spacing) : 0, a.taps));
    if (runs.empty() || runs.back().lo != lo || runs.back().hi != hi) {
      runs.push_back({q, q, lo, hi});
    }
    runs.back().end = q + 1;
  }
  return runs;
}

// One spatial axis. For the input gradient, i = s * stride + t * dilation -
// pad_low says for which taps i = q * stride + phase has an s.
Axis MakeAxis(const ConvProblem& p, int axis) {
  const int64_t stride = p.stride[axis], dilation = p.dilation[axis];
  const int64_t pad = p.pad_low[axis], kernel = p.kernel[axis];
  Axis all;
  if (p.pass != ConvPass::kInputGrad) {
    all.phases.push_back({p.in[axis], p.out[axis], stride, -pad, dilation,
                          kernel, 0, 1, 0, 1, nullptr, 0});
  } else {
    const int64_t common = std::gcd(stride, dilation);
    const int64_t step = stride / common;  // between taps of a phase
    for (int64_t r = 0; r == 0 || r < std::min(stride, p.in[axis]); ++r) {
      int64_t first = 0;
      while (first < std::min(step, kernel) &&
             (r + pad - first * dilation) % stride != 0) {
        ++first;
      }
      const bool any = first < std::min(step, kernel);
      const int64_t taps = any ? CeilDiv(kernel - first, step) : 0;
      // From the last tap on, so that what is read comes in rising order.
      const int64_t last = any ? first + (taps - 1) * step : 0;
      const int64_t offset = any ? (r + pad - last * dilation) / stride : 0;
      all.phases.push_back({p.out[axis], CeilDiv(p.in[axis] - r, stride), 1,
                            offset, dilation / common, taps, last, -step, r,
                            stride, nullptr, 0});
    }
  }
  for (DepthwiseAxis& phase : all.phases) {
    all.runs.push_back(RunsOf(phase));
    phase.runs = all.runs.back().data();
    phase.num_runs = static_cast<int64_t>(all.runs.back().size());
    all.most = std::max(all.most, phase.count);
  }
  return all;
}

// What the results [begin, end) of all phases read: a first index and a count.
void Reach(const Axis& axis, int64_t begin, int64_t end, int64_t* first,
           int64_t* count) {
  int64_t lo = INT64_MAX, hi = INT64_MIN;
  for (const DepthwiseAxis& a : axis.phases) {
    const int64_t last = std::min(end, a.count) - 1;
    if (a.taps == 0 || last < begin) continue;
    lo = std::min(lo, a.offset + begin * a.step);
    hi = std::max(hi, a.offset + last * a.step + (a.taps - 1) * a.spacing + 1);
  }
  *first = lo < hi ? lo : 0;
  *count = lo < hi ? hi - lo : 0;
}

// How the problem is cut. The weight gradient is cut without a thought for the
// number of threads, so that it adds in the same order whatever that is.
struct Cut {
  bool last = false;
  int64_t groups = 1;          // of contiguous channels, in blocked layouts
  int64_t channels = 1;        // of a group
  int64_t step = 1;            // channels of a tile, of those
  int64_t images = 1;          // of a tile
  int64_t rows = 1, cols = 1;  // of results, of a phase, of a tile

  int64_t channel_tiles() const { return CeilDiv(channels, step); }
};

int64_t Taps(const ConvProblem& p) {
  return p.kernel[0] * p.kernel[1] * p.kernel[2];
}

// The size of pieces, nearly even, of no more than `most` things each, and, if
// there are as many things, no fewer than `count`.
int64_t Piece(int64_t all, int64_t most, int64_t count) {
  if (all <= 1) return 1;
  const int64_t pieces = std::max(CeilDiv(all, std::max<int64_t>(1, most)),
                                  std::max<int64_t>(1, count));
  return CeilDiv(all, std::min(pieces, all));
}

Cut MakeCut(const ConvProblem& p, const Axis& rows, const Axis& cols,
            int num_threads) {
  // Floats of a tile that stays in L2, and sums of products worth a task.
  constexpr int64_t kTile = 64 << 10, kWork = 128 << 10;
  const bool weights = p.pass == ConvPass::kWeightGrad;
  const int64_t work = p.batch * p.in_channels * p.out[1] * p.out[2] * Taps(p);
  const int64_t wanted =
      std::min<int64_t>(work / kWork + 1, weights            ? 32
                                          : num_threads == 1 ? 1
                                                             : 8 * num_threads);
  Cut cut;
  cut.last = IsLast(p);
  int64_t most_cols = kTile / 4;
  int64_t most_rows = rows.most;
  if (cut.last) {
    cut.channels = p.x.block > 1 ? p.x.block : p.in_channels;
    cut.groups = p.in_channels / cut.channels;
    // The taps and the rows that they meet stay in L1.
    const int64_t lines =
        Taps(p) + p.kernel[1] * std::min<int64_t>(p.in[2], 64);
    cut.step =
        std::min(cut.channels,
                 std::max<int64_t>(
                     64, (8 << 10) / std::max<int64_t>(1, lines) / 16 * 16));
  } else {
    cut.channels = p.in_channels;
    const int64_t row = std::max(p.in[2], p.out[2]);
    const int64_t plane =
        std::max<int64_t>(1, std::max(p.in[1], p.out[1]) * row);
    cut.step =
        Piece(cut.channels, kTile / plane,
              CeilDiv(wanted, weights ? 1 : std::max<int64_t>(1, p.batch)));
    most_rows = std::max<int64_t>(
        1, kTile / std::max<int64_t>(1, std::min(row, most_cols)));
  }
  int64_t units = cut.groups * cut.channel_tiles();
  if (weights) cut.images = Piece(p.batch, p.batch, CeilDiv(wanted, units));
  units *= CeilDiv(std::max<int64_t>(1, p.batch), cut.images);
  cut.rows = Piece(rows.most, most_rows, CeilDiv(wanted, units));
  units *= CeilDiv(std::max<int64_t>(1, rows.most), cut.rows);
  // Whole vectors, and long ones.
  cut.cols =
      RoundUp(Piece(cols.most, most_cols,
                    std::min(CeilDiv(wanted, units), CeilDiv(cols.most, 256))),
              16);
  return cut;
}

// Where things lie in the workspace, in bytes.
struct Workspace {
  int64_t w = 0;        // [tap][channel], where w cannot be read in place
  int64_t partial = 0;  // [piece][tap][channel], of the weight gradient
  int64_t scratch = 0;  // of each thread
  int64_t scratch_bytes = 0;
  int64_t size = 0;
};

// Whether the kernels can read the weights where they are.
bool InPlace(const ConvProblem& p, const Cut& cut) {
  return p.type == DType::kF32 && (!cut.last || p.w.strides[0] == 1);
}

int64_t Pieces(const ConvProblem& p, const Cut& cut, const Axis& rows,
               const Axis& cols) {
  return CeilDiv(p.batch, cut.images) * CeilDiv(rows.most, cut.rows) *
         CeilDiv(cols.most, cut.cols);
}

// Channels of a row of packed taps or sums, with room for whole vectors.
int64_t PackedRow(const ConvProblem& p) { return RoundUp(p.in_channels, 16); }

Workspace MakeWorkspace(const ConvProblem& p, const Cut& cut, const Axis& rows,
                        const Axis& cols, int num_threads) {
  Workspace s;
  const int64_t packed = Taps(p) * PackedRow(p) * kFloat;
  int64_t end = kLine;  // to begin at a line
  if (p.pass == ConvPass::kWeightGrad) {
    s.partial = end;
    end += packed * std::max<int64_t>(1, Pieces(p, cut, rows, cols));
  } else if (!InPlace(p, cut)) {
    s.w = end;
    end += packed;
  }
  if (!cut.last) {
    const int64_t phases = static_cast<int64_t>(cols.phases.size());
    int64_t stage_rows = 0, stage_cols = 0, first, count;
    for (int64_t q = 0; q < rows.most; q += cut.rows) {
      Reach(rows, q, q + cut.rows, &first, &count);
      stage_rows = std::max(stage_rows, count);
    }
    for (int64_t q = 0; q < cols.most; q += cut.cols) {
      Reach(cols, q, q + cut.cols, &first, &count);
      stage_cols = std::max(stage_cols, count);
    }
    int64_t floats =
        PlaneScratch(StagedPlane(stage_rows, stage_cols, cols.phases[0].step),
                     phases, std::min(cut.cols, cols.most));
    if (p.pass == ConvPass::kWeightGrad) floats += cut.step * Taps(p) * 16;
    s.scratch_bytes = RoundUp(floats * kFloat, 2 * kLine);
    s.scratch = end;
    end += s.scratch_bytes *
           std::min<int64_t>(num_threads, Pieces(p, cut, rows, cols) *
                                              cut.groups * cut.channel_tiles());
  }
  s.size = end;
  return s;
}

int64_t ChannelAt(const ConvLayout& layout, int64_t c) {
  return c / layout.block * layout.strides[1] + c % layout.block;
}

// --- The passes ---

// The address of a tap of the first filter, in elements.
int64_t TapAt(const ConvProblem& p, int64_t tap) {
  return tap / p.kernel[2] * p.w.strides[3] +
         tap % p.kernel[2] * p.w.strides[4];
}

void PackWeights(const DepthwiseKernels& kernels, const ConvProblem& p,
                 const void* w, float* packed) {
  for (int64_t t = 0; t < Taps(p); ++t) {
    kernels.read(p.type,
                 static_cast<const char*>(w) + TapAt(p, t) * Itemsize(p.type),
                 p.w.strides[0], p.in_channels, packed + t * PackedRow(p));
  }
}

// The sum of all pieces, in their order, to w.
void Reduce(const DepthwiseKernels& kernels, const ConvProblem& p,
            int64_t pieces, float* partial, void* w) {
  const int64_t size = Taps(p) * PackedRow(p);
  if (pieces == 0) std::fill_n(partial, size, 0.f);
  for (int64_t piece = 1; piece < pieces; ++piece) {
    const float* from = partial + piece * size;
    for (int64_t i = 0; i < size; ++i) partial[i] += from[i];
  }
  for (int64_t t = 0; t < Taps(p); ++t) {
    kernels.write(p.result, partial + t * PackedRow(p), p.in_channels,
                  static_cast<char*>(w) + TapAt(p, t) * Itemsize(p.result),
                  p.w.strides[0]);
  }
}

const Kernels<const DepthwiseKernels*> kKernels(
    "depthwise", {
#ifdef __x86_64__
                     {Isa::kAvx512, &kDepthwiseAvx512},
                     {Isa::kAvx2, &kDepthwiseAvx2},
#elif defined(__aarch64__)
                     {Isa::kNeon, &kDepthwiseNeon},
#endif
                     {Isa::kPortable, &kDepthwisePortable}});

}  // namespace

bool DepthwiseSupports(const ConvProblem& p) {
  if (!IsFloat(p.type) || (p.result != p.type && p.result != DType::kF32) ||
      (kKernels.At() == &kDepthwisePortable && p.type != DType::kF32)) {
    return false;
  }
  if (p.groups != p.in_channels || p.groups != p.out_channels || p.in[0] != 1 ||
      p.kernel[0] != 1 || p.out[0] != 1 || p.pad_low[0] != 0 ||
      p.w.block != 1) {
    return false;
  }
  return IsLast(p) || IsPlanes(p);
}

int64_t DepthwiseWorkspace(const ConvProblem& problem, int num_threads) {
  const Axis rows = MakeAxis(problem, 1), cols = MakeAxis(problem, 2);
  const Cut cut = MakeCut(problem, rows, cols, num_threads);
  return MakeWorkspace(problem, cut, rows, cols, num_threads).size;
}

Status Depthwise(const ConvProblem& problem, const ConvBuffers& buffers,
                 const Executor& executor) {
  return Depthwise(problem, buffers, executor, BestIsa());
}

Status Depthwise(const ConvProblem& p, const ConvBuffers& buffers,
                 const Executor& executor, Isa isa) {
  if (!DepthwiseSupports(p)) return Status::Error("conv: not depthwise.");
  const DepthwiseKernels& kernels = *kKernels.Take(isa);
  const int num_threads = std::max(1, executor.num_threads());
  const bool weights = p.pass == ConvPass::kWeightGrad;
  const Axis rows = MakeAxis(p, 1), cols = MakeAxis(p, 2);
  const Cut cut = MakeCut(p, rows, cols, num_threads);
  const Workspace space = MakeWorkspace(p, cut, rows, cols, num_threads);
  char* const base = reinterpret_cast<char*>(
      RoundUp(reinterpret_cast<intptr_t>(buffers.workspace), kLine));
  // One line of the workspace is there to begin at a line.
  auto floats_at = [&](int64_t at) {
    return reinterpret_cast<float*>(base + at - kLine);
  };

  DepthwiseTile all = {};
  all.type = p.type;
  all.result = p.result;
  const ConvLayout& in = Read(p);
  const ConvLayout& out = Written(p);
  all.in_row = in.strides[3];
  all.in_col = in.strides[4];
  all.in_plane = in.strides[1];
  all.out_row = out.strides[3];
  all.out_col = out.strides[4];
  all.out_plane = out.strides[1];
  all.relu = p.relu && p.pass == ConvPass::kForward;
  all.rows = rows.phases.data();
  all.cols = cols.phases.data();
  all.row_phases = static_cast<int64_t>(rows.phases.size());
  all.col_phases = static_cast<int64_t>(cols.phases.size());
  int64_t w_channel = 1;
  if (weights) {
    all.sums_tap = PackedRow(p);
  } else if (InPlace(p, cut)) {
    all.w = static_cast<const float*>(buffers.w);
    w_channel = p.w.strides[0];
    all.w_row = p.w.strides[3];
    all.w_col = p.w.strides[4];
  } else {
    float* packed = floats_at(space.w);
    PackWeights(kernels, p, buffers.w, packed);
    all.w = packed;
    all.w_col = PackedRow(p);
    all.w_row = p.kernel[2] * all.w_col;
  }
  all.w_plane = w_channel;

  const char* const from = static_cast<const char*>(
      p.pass == ConvPass::kInputGrad ? buffers.y : buffers.x);
  char* const to = static_cast<char*>(
      p.pass == ConvPass::kInputGrad ? buffers.x : buffers.y);
  const int64_t in_item = Itemsize(p.type);
  const int64_t out_item = Itemsize(weights ? p.type : p.result);
  const int64_t channel_tiles = cut.channel_tiles();
  const int64_t row_tiles = CeilDiv(rows.most, cut.rows);
  const int64_t col_tiles = CeilDiv(cols.most, cut.cols);
  const int64_t pieces = Pieces(p, cut, rows, cols);
  const int64_t units = pieces * cut.groups * channel_tiles;

  executor.ParallelForWorkers(
      units, executor.num_threads(), [&](int64_t unit, int64_t thread) {
        // Channels go fastest, so that threads read neighbouring memory.
        const int64_t tile = unit % channel_tiles;
        const int64_t group = unit / channel_tiles % cut.groups;
        const int64_t piece = unit / channel_tiles / cut.groups;
        const int64_t col = piece % col_tiles * cut.cols;
        const int64_t row = piece / col_tiles % row_tiles * cut.rows;
        const int64_t image = piece / col_tiles / row_tiles * cut.images;
        const int64_t channel = group * cut.channels + tile * cut.step;
        DepthwiseTile b = all;
        b.channels = std::min(cut.step, cut.channels - tile * cut.step);
        b.row_begin = row;
        b.row_end = std::min(row + cut.rows, rows.most);
        b.col_begin = col;
        b.col_end = std::min(col + cut.cols, cols.most);
        if (!weights) {
          b.w += channel * w_channel;
          if (p.bias) {
            b.bias =
                static_cast<const char*>(buffers.bias) + channel * out_item;
          }
        }
        float* sums = nullptr;
        if (!cut.last) {
          Reach(rows, row, b.row_end, &b.stage_row, &b.stage_rows);
          Reach(cols, col, b.col_end, &b.stage_col, &b.stage_cols);
          b.scratch = floats_at(space.scratch + thread * space.scratch_bytes);
          sums = b.scratch;
          if (weights) b.scratch += b.channels * Taps(p) * kernels.lanes;
        }
        const int64_t taps = Taps(p);
        float* partial = nullptr;
        if (weights) {
          partial =
              floats_at(space.partial) + piece * taps * all.sums_tap + channel;
          if (cut.last) {
            for (int64_t t = 0; t < taps; ++t) {
              std::fill_n(partial + t * all.sums_tap, b.channels, 0.f);
            }
            b.sums = partial;
          } else {
            std::fill_n(sums, b.channels * taps * kernels.lanes, 0.f);
            b.sums = sums;
          }
        }
        const int64_t last_image = std::min(image + cut.images, p.batch);
        for (int64_t n = image; n < last_image; ++n) {
          b.in = from + (n * in.strides[0] + ChannelAt(in, channel)) * in_item;
          b.out =
              to + (n * out.strides[0] + ChannelAt(out, channel)) * out_item;
          if (weights) {
            cut.last ? kernels.last_weights(b) : kernels.plane_weights(b);
          } else {
            cut.last ? kernels.last(b) : kernels.planes(b);
          }
        }
        if (weights && !cut.last) {
          for (int64_t c = 0; c < b.channels; ++c) {
            kernels.sum(sums + c * taps * kernels.lanes, taps, partial + c,
                        all.sums_tap);
          }
        }
      });
  if (weights) {
    Reduce(kernels, p, pieces, floats_at(space.partial), buffers.w);
  }
  return Status::Ok();
}

}  // namespace jax_layout
