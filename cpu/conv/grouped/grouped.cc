// SPDX-License-Identifier: Apache-2.0
//
// From a problem to tasks: an image's rows of some blocks of channels. A task
// stages what they read, a block's channels side by side and zeros around them,
// so that x and y may each be channels-last or row-major.
#include "cpu/conv/grouped/grouped.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/conv/grouped/kernels.h"
#include "cpu/permute/permute.h"

namespace jax_layout {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLine = 64;
constexpr int64_t kMostLanes = 16;
constexpr int64_t kMostChannels = 16;  // of a group

const Kernels<const GroupedKernels*> kKernels(
    "grouped", {
#ifdef __x86_64__
                   {Isa::kAvx512, &kGroupedAvx512},
                   {Isa::kAvx2, &kGroupedAvx2},
#elif defined(__aarch64__)
                   {Isa::kNeon, &kGroupedNeon},
#endif
                   {Isa::kPortable, &kGroupedPortable}});

// --- What the problem is in terms of the kernels ---

// Results q along an axis read at q * step - pad + t * spacing for taps t.
struct Axis {
  int64_t in, out, taps, step, spacing, pad;

  // Of what `results` of them read.
  int64_t Reach(int64_t results) const {
    return (results - 1) * step + (taps - 1) * spacing + 1;
  }
};

// The forward pass, or the input gradient of a convolution with stride 1, which
// is one with the filters turned around.
struct Plan {
  Axis rows, cols;
  ConvLayout in, out;
  int64_t ins, outs;  // channels of a group
  // w, from what the first filter's first tap is multiplied with.
  int64_t w_first, w_group, w_out, w_in, w_row, w_col;

  int64_t lanes;
  int64_t members;  // groups that share a vector
  int64_t vectors;  // of a group
  int64_t blocks;   // of channels, of a vector or a group
  int64_t pitch;    // floats of a staged pixel

  int64_t unit_blocks, tile_rows;  // of a task, which is of one image
  int64_t turned_rows;             // at a time
  int64_t units;

  int64_t staged() const {
    return rows.Reach(tile_rows) * cols.Reach(cols.out) * pitch;
  }
  int64_t filters() const {
    return vectors * rows.taps * cols.taps * ins * lanes;
  }
  bool turned() const { return out.strides[1] != 1; }
  // Floats of a thread's memory: filters and bias of each block, the stage, and
  // results to be turned.
  int64_t packed() const { return filters() + vectors * lanes; }
  int64_t scratch() const {
    return RoundUp(blocks * packed() + staged() +
                       (turned() ? turned_rows * cols.out * lanes : 0),
                   2 * kLine / kFloat);
  }
};

// The size of nearly even pieces, no fewer than `count` of them if there are as
// many things.
int64_t Piece(int64_t all, int64_t count) {
  return CeilDiv(all, std::clamp<int64_t>(count, 1, all));
}

Plan MakePlan(const ConvProblem& p, int64_t lanes, int num_threads) {
  // Floats of a stage that stays in L2, and sums of products worth a task.
  constexpr int64_t kStage = 32 << 10, kWork = 256 << 10;
  const bool forward = p.pass == ConvPass::kForward;
  const auto axis = [&](int i) {
    const int64_t reach = (p.kernel[i] - 1) * p.dilation[i];
    return forward ? Axis{p.in[i],     p.out[i],      p.kernel[i],
                          p.stride[i], p.dilation[i], p.pad_low[i]}
                   : Axis{p.out[i], p.in[i],       p.kernel[i],
                          1,        p.dilation[i], reach - p.pad_low[i]};
  };
  Plan plan;
  plan.rows = axis(1);
  plan.cols = axis(2);
  const int64_t x_channels = p.in_channels / p.groups;
  const int64_t y_channels = p.out_channels / p.groups;
  const auto& w = p.w.strides;
  plan.w_group = y_channels * w[0];
  if (forward) {
    plan.in = p.x;
    plan.out = p.y;
    plan.ins = x_channels;
    plan.outs = y_channels;
    plan.w_first = 0;
    plan.w_out = w[0];
    plan.w_in = w[1];
    plan.w_row = w[3];
    plan.w_col = w[4];
  } else {
    plan.in = p.y;
    plan.out = p.x;
    plan.ins = y_channels;
    plan.outs = x_channels;
    plan.w_first = (p.kernel[1] - 1) * w[3] + (p.kernel[2] - 1) * w[4];
    plan.w_out = w[1];
    plan.w_in = w[0];
    plan.w_row = -w[3];
    plan.w_col = -w[4];
  }
  plan.lanes = lanes;
  plan.members = std::max<int64_t>(1, lanes / plan.outs);
  plan.vectors = std::max<int64_t>(1, plan.outs / lanes);
  plan.blocks = p.groups / plan.members;
  plan.pitch = RoundUp(plan.members * plan.ins, lanes);

  const int64_t work = p.batch * p.groups * plan.outs * plan.ins *
                       plan.rows.out * plan.cols.out * plan.rows.taps *
                       plan.cols.taps;
  const int64_t wanted =
      num_threads == 1 ? 1 : std::min<int64_t>(work / kWork, 8 * num_threads);
  const int64_t row = plan.cols.Reach(plan.cols.out) * plan.pitch;
  const int64_t most = std::max<int64_t>(
      1, (kStage / row - plan.rows.Reach(1)) / plan.rows.step + 1);
  plan.tile_rows =
      Piece(plan.rows.out, std::max(CeilDiv(plan.rows.out, most),
                                    CeilDiv(wanted, p.batch * plan.blocks)));
  plan.turned_rows = std::clamp<int64_t>(64 / plan.cols.out, 1, plan.tile_rows);
  const int64_t tiles = p.batch * CeilDiv(plan.rows.out, plan.tile_rows);
  plan.unit_blocks = Piece(plan.blocks, CeilDiv(wanted, tiles));
  plan.units = tiles * CeilDiv(plan.blocks, plan.unit_blocks);
  return plan;
}

// --- A task ---

struct Task {
  const Plan& plan;
  const ConvBuffers& buffers;
  const GroupedKernels& kernels;
  BlockFunction* transpose;
  // Where channels and pixels are, in bytes, of a stage and of results.
  std::vector<int64_t> in_channels, in_pixels, out_channels, out_pixels;
  std::array<int32_t, kMostLanes> in_order = {}, out_order = {};

  Task(const Plan& p, const ConvBuffers& b, const GroupedKernels& kernels,
       const PermuteFunctions& permutes)
      : plan(p),
        buffers(b),
        kernels(kernels),
        transpose(permutes.transpose[2]) {
    for (int64_t j = 0; j < p.ins; ++j) {
      for (int64_t g = 0; g < p.members; ++g) {
        const int64_t channel = g * p.ins + j;
        in_channels.push_back(channel * p.in.strides[1] * kFloat);
        if (p.members > 1) {
          in_order[j * p.members + g] = static_cast<int32_t>(channel);
        }
      }
    }
    for (int64_t lane = 0; lane < p.lanes; ++lane) {
      out_channels.push_back(lane * p.out.strides[1] * kFloat);
      if (p.members > 1) {
        out_order[lane] =
            static_cast<int32_t>(lane % p.outs * p.members + lane / p.outs);
      }
    }
    const int64_t width = p.cols.Reach(p.cols.out);
    if (p.in.strides[1] != 1) {
      const int64_t row = std::min(p.cols.in, width);
      for (int64_t i = 0; i < p.rows.Reach(p.tile_rows) * row; ++i) {
        in_pixels.push_back((i / row * width + i % row) * p.pitch * kFloat);
      }
    }
    if (p.turned()) {
      for (int64_t i = 0; i < p.turned_rows * p.cols.out; ++i) {
        out_pixels.push_back(i * p.lanes * kFloat);
      }
    }
  }

  void Pack(int64_t block, float* filters, float* bias, bool has_bias) const {
    const Plan& p = plan;
    for (int64_t v = 0; v < p.vectors; ++v) {
      for (int64_t lane = 0; lane < p.lanes; ++lane) {
        const int64_t group = block * p.members + lane % p.members;
        const int64_t out = v * p.lanes + lane / p.members;
        const float* from = static_cast<const float*>(buffers.w) + p.w_first +
                            group * p.w_group + out * p.w_out;
        float* to = filters + lane;
        for (int64_t k = 0; k < p.rows.taps; ++k) {
          for (int64_t c = 0; c < p.ins; ++c) {
            for (int64_t l = 0; l < p.cols.taps; ++l, to += p.lanes) {
              *to = from[k * p.w_row + c * p.w_in + l * p.w_col];
            }
          }
        }
        bias[lane] =
            has_bias
                ? static_cast<const float*>(buffers.bias)[group * p.outs + out]
                : 0;
      }
      filters += p.rows.taps * p.cols.taps * p.ins * p.lanes;
      bias += p.lanes;
    }
  }

  // Stages what `count` rows of results from `row` on read; x is the first
  // pixel of the image.
  void Stage(const float* x, int64_t row, int64_t count, float* stage) const {
    const Plan& p = plan;
    const auto& strides = p.in.strides;
    const int64_t height = p.rows.Reach(count);
    const int64_t width = p.cols.Reach(p.cols.out);
    // What lies inside of the image: lines [top, bottom), columns [left,
    // right).
    const int64_t at = row * p.rows.step - p.rows.pad;
    const int64_t top = std::clamp<int64_t>(-at, 0, height);
    const int64_t bottom = std::clamp(p.rows.in - at, top, height);
    const int64_t left = std::clamp<int64_t>(p.cols.pad, 0, width);
    const int64_t right = std::clamp(p.cols.in + p.cols.pad, left, width);
    const auto zero = [&](int64_t line, int64_t from, int64_t to) {
      std::fill_n(stage + (line * width + from) * p.pitch,
                  (to - from) * p.pitch, 0.f);
    };
    for (int64_t i = 0; i < top; ++i) zero(i, 0, width);
    for (int64_t i = bottom; i < height; ++i) zero(i, 0, width);
    for (int64_t i = top; i < bottom; ++i) {
      zero(i, 0, left);
      zero(i, right, width);
    }
    if (top == bottom || left == right) return;
    x += (at + top) * strides[3] + (left - p.cols.pad) * strides[4];
    stage += (top * width + left) * p.pitch;
    const int64_t pixels = right - left;
    if (strides[1] == 1) {
      for (int64_t i = top; i < bottom; ++i) {
        kernels.stage({x, strides[4], stage, p.pitch, pixels, p.members * p.ins,
                       p.members > 1 ? in_order.data() : nullptr});
        x += strides[3];
        stage += width * p.pitch;
      }
      return;
    }
    // All lines at once where they are one after the other.
    const bool whole = strides[3] == pixels;
    PermuteBlock b = {};
    b.x_offset = in_channels.data();
    b.y_offset = in_pixels.data();
    b.rows = p.members * p.ins;
    b.cols = whole ? (bottom - top) * pixels : pixels;
    b.bytes = kFloat;
    for (int64_t i = top; i < (whole ? top + 1 : bottom); ++i) {
      b.x = reinterpret_cast<const char*>(x);
      b.y = reinterpret_cast<char*>(stage);
      transpose(b);
      x += strides[3];
      stage += width * p.pitch;
    }
  }

  // From pixels of results to planes; y is the first result's.
  void Turn(const float* results, int64_t count, float* y) const {
    const Plan& p = plan;
    const bool whole = p.out.strides[3] == p.cols.out;
    PermuteBlock b = {};
    b.x_offset = out_pixels.data();
    b.y_offset = out_channels.data();
    b.rows = whole ? count * p.cols.out : p.cols.out;
    b.cols = p.lanes;
    b.bytes = kFloat;
    for (int64_t i = 0; i < (whole ? 1 : count); ++i) {
      b.x = reinterpret_cast<const char*>(results);
      b.y = reinterpret_cast<char*>(y);
      transpose(b);
      results += p.cols.out * p.lanes;
      y += p.out.strides[3];
    }
  }

  // Fetches what the next block's rows of results from `row` on read first.
  void Fetch(const float* x, int64_t row) const {
    const Plan& p = plan;
    if (p.in.strides[1] != 1) return;
    const int64_t channels = p.members * p.ins;
    for (int64_t i = 0; i < p.rows.step; ++i) {
      const int64_t at = row * p.rows.step + i;
      if (at >= p.rows.in) return;
      const float* from = x + channels + at * p.in.strides[3];
      for (int64_t j = 0; j < p.cols.in; ++j, from += p.in.strides[4]) {
        __builtin_prefetch(from, 0, 2);
      }
    }
  }

  void FetchResults(const float* y) const {
    for (int64_t i = 0; i < plan.lanes; ++i) {
      __builtin_prefetch(y + i * plan.out.strides[1], 1, 3);
    }
  }

  // `packed` are the blocks whose filters are in the thread's memory.
  void Run(const ConvProblem& problem, int64_t unit, float* memory,
           std::vector<bool>* packed) const {
    const Plan& p = plan;
    const bool forward = problem.pass == ConvPass::kForward;
    const auto* in = static_cast<const float*>(forward ? buffers.x : buffers.y);
    auto* out = static_cast<float*>(forward ? buffers.y : buffers.x);
    // Channels go fastest, so that what is read and written stays in cache.
    const int64_t pieces = CeilDiv(p.blocks, p.unit_blocks);
    const int64_t first = unit % pieces * p.unit_blocks;
    const int64_t tiles = CeilDiv(p.rows.out, p.tile_rows);
    const int64_t row = unit / pieces % tiles * p.tile_rows;
    const int64_t image = unit / pieces / tiles;
    const int64_t count = std::min(p.tile_rows, p.rows.out - row);
    in += image * p.in.strides[0];
    out += image * p.out.strides[0] + row * p.out.strides[3];
    float* const stage = memory + p.blocks * p.packed();
    float* const results = stage + p.staged();

    const int64_t width = p.cols.Reach(p.cols.out);
    GroupedRow b = {};
    b.in_row = p.rows.spacing * width * p.pitch;
    b.in_col = p.cols.spacing * p.pitch;
    b.in_step = p.cols.step * p.pitch;
    b.out_step = p.turned() ? p.lanes : p.out.strides[4];
    b.count = p.cols.out;
    b.tap_rows = p.rows.taps;
    b.channels = p.ins;
    b.tap_cols = p.cols.taps;
    b.members = p.members;
    b.order = out_order.data();
    b.relu = problem.relu;
    const int64_t last = std::min(first + p.unit_blocks, p.blocks);
    for (int64_t block = first; block < last; ++block) {
      const int64_t group = block * p.members;
      float* const filters = memory + block * p.packed();
      float* const bias = filters + p.filters();
      if (!(*packed)[block]) Pack(block, filters, bias, problem.bias);
      (*packed)[block] = true;
      const float* x = in + group * p.ins * p.in.strides[1];
      Stage(x, row, count, stage);
      for (int64_t v = 0; v < p.vectors; ++v) {
        const int64_t channel = group * p.outs + v * p.lanes;
        float* y = out + channel * p.out.strides[1];
        b.w = filters + v * (p.filters() / p.vectors);
        b.bias = bias + v * p.lanes;
        int64_t done = 0;  // rows
        for (int64_t i = 0; i < count; ++i) {
          if (block + 1 < last && v == 0) Fetch(x, row + i);
          b.in = stage + i * p.rows.step * width * p.pitch;
          b.out = p.turned() ? results + (i - done) * p.cols.out * p.lanes
                             : y + i * p.out.strides[3];
          if (p.turned()) FetchResults(y + i * p.out.strides[3]);
          kernels.row(b);
          if (p.turned() && (i + 1 == count || i + 1 - done == p.turned_rows)) {
            Turn(results, i + 1 - done, y + done * p.out.strides[3]);
            done = i + 1;
          }
        }
      }
    }
  }
};

bool IsLastOrPlanes(const ConvLayout& layout, int64_t cols) {
  return layout.block == 1 &&
         (layout.strides[1] == 1 || layout.strides[4] == 1 || cols == 1);
}

}  // namespace

bool GroupedSupports(const ConvProblem& p, Isa isa) {
  if (p.type != DType::kF32 || p.result != DType::kF32 || p.groups == 1 ||
      p.in[0] != 1 || p.kernel[0] != 1 || p.out[0] != 1 || p.pad_low[0] != 0 ||
      p.w.block != 1) {
    return false;
  }
  const bool forward = p.pass == ConvPass::kForward;
  if (p.pass == ConvPass::kWeightGrad ||
      (!forward && (p.stride[1] != 1 || p.stride[2] != 1))) {
    return false;
  }
  if (!IsLastOrPlanes(p.x, p.in[2]) || !IsLastOrPlanes(p.y, p.out[2])) {
    return false;
  }
  const GroupedKernels& kernels = *kKernels.At(isa);
  int64_t ins = p.in_channels / p.groups, outs = p.out_channels / p.groups;
  if (!forward) std::swap(ins, outs);
  if (ins > kMostChannels || outs > kMostChannels) return false;
  if (outs >= kernels.lanes) return outs % kernels.lanes == 0;
  const int64_t members = kernels.lanes / outs;
  return kernels.lanes % outs == 0 && members <= kernels.members &&
         p.groups % members == 0 && ins <= outs;
}

int64_t GroupedWorkspace(const ConvProblem& p, int num_threads, Isa isa) {
  const Plan plan = MakePlan(p, kKernels.At(isa)->lanes, num_threads);
  return kLine +
         std::min<int64_t>(num_threads, plan.units) * plan.scratch() * kFloat;
}

Status Grouped(const ConvProblem& p, const ConvBuffers& buffers,
               const Executor& executor, Isa isa) {
  if (!GroupedSupports(p, isa)) {
    return Status::Error("conv: not in groups of few channels.");
  }
  const GroupedKernels& kernels = *kKernels.Take(isa);
  const int num_threads = std::max(1, executor.num_threads());
  const Plan plan = MakePlan(p, kernels.lanes, num_threads);
  const Task task(plan, buffers, kernels, FunctionsOf(isa));
  auto* const memory = reinterpret_cast<float*>(
      RoundUp(reinterpret_cast<intptr_t>(buffers.workspace), kLine));
  std::vector<std::vector<bool>> packed(num_threads,
                                        std::vector<bool>(plan.blocks));
  executor.ParallelForWorkers(
      plan.units, num_threads, [&](int64_t unit, int64_t thread) {
        task.Run(p, unit, memory + thread * plan.scratch(), &packed[thread]);
      });
  return Status::Ok();
}

bool GroupedSupports(const ConvProblem& p) {
  if (!GroupedSupports(p, BestIsa())) return false;
  // oneDNN's kernels read and write channels-last arrays as they are; ours are
  // ahead where a vector has several groups, and staged pixels are read often.
  const bool last = p.x.strides[1] == 1 && p.y.strides[1] == 1;
  return !last ||
         (std::max(p.in_channels, p.out_channels) < 16 * p.groups &&
          p.kernel[1] * p.kernel[2] > 1 && p.stride[1] * p.stride[2] == 1);
}

int64_t GroupedWorkspace(const ConvProblem& problem, int num_threads) {
  return GroupedWorkspace(problem, num_threads, BestIsa());
}

Status Grouped(const ConvProblem& problem, const ConvBuffers& buffers,
               const Executor& executor) {
  return Grouped(problem, buffers, executor, BestIsa());
}

}  // namespace jax_layout
