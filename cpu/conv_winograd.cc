// SPDX-License-Identifier: Apache-2.0
//
// The filters are transformed first, by all threads. Then each takes blocks of
// tiles, whose transforms and products stay in its cache, while the filters
// pass by.
#include "cpu/conv_winograd.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/conv_winograd_kernels.h"
#include "cpu/gemm_tiles.h"
#include "cpu/permute.h"

namespace jax_layout {
namespace {

constexpr int64_t kPositions = 16;  // of a transformed tile
constexpr int64_t kTaps = 9;
constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLine = 64;
constexpr int64_t kChannels = 32;         // a multiple of every panel
constexpr int64_t kPackedChannels = 16;   // filters that are packed at a time
constexpr int64_t kBlockBytes = 3 << 18;  // of transformed tiles, in L2
constexpr int64_t kLeastBlock = 32;       // tiles for which filters pass by

const WinogradKernels* KernelsOf(Floats floats) {
#ifdef __x86_64__
  if (floats == Floats::kAvx512) return &kWinogradAvx512;
  if (floats == Floats::kAvx2) return &kWinogradAvx2;
#endif
  static_cast<void>(floats);
  return nullptr;
}

// The input gradient is a convolution of y with the filters turned round.
struct Filtering {
  explicit Filtering(const ConvProblem& p)
      : forward(p.pass == ConvPass::kForward),
        channels(forward ? p.in_channels : p.out_channels),
        out_channels(forward ? p.out_channels : p.in_channels),
        w_out(p.w.strides[forward ? 0 : 1]),
        w_in(p.w.strides[forward ? 1 : 0]),
        w_row(p.w.strides[3]),
        w_col(p.w.strides[4]) {
    const auto image = [](const ConvLayout& layout,
                          const std::array<int64_t, 3>& sizes) {
      return WinogradImage{sizes[1], sizes[2], layout.strides[0],
                           layout.strides[3], layout.strides[4]};
    };
    tiles.in = forward ? image(p.x, p.in) : image(p.y, p.out);
    tiles.out = forward ? image(p.y, p.out) : image(p.x, p.in);
    tiles.pad_row = forward ? p.pad_low[1] : 2 - p.pad_low[1];
    tiles.pad_col = forward ? p.pad_low[2] : 2 - p.pad_low[2];
    tiles.rows = CeilDiv(tiles.out.height, 2);
    tiles.cols = CeilDiv(tiles.out.width, 2);
    count = p.batch * tiles.rows * tiles.cols;
  }

  bool forward;
  int64_t channels, out_channels;
  int64_t w_out, w_in, w_row, w_col;  // steps, in elements
  WinogradTiles tiles;
  int64_t count = 0;  // of tiles
};

int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// How the work is cut, and where what lies in the workspace, in floats.
struct Cut {
  Cut(const Filtering& f, const WinogradKernels& kernels, int num_threads) {
    const int64_t panels = f.out_channels / kernels.panel;
    workers = std::max(num_threads, 1);
    const int64_t most =
        std::max(kBlockBytes / (kPositions * f.channels * kFloat), kLeastBlock);
    blocks = CeilDiv(f.count, most);
    if (blocks > 1) blocks = RoundUp(blocks, workers);
    block = CeilDiv(f.count, blocks);
    blocks = CeilDiv(f.count, block);
    workers = std::min(workers, blocks);
    // Planes an odd number of lines apart do not meet in the same cache sets.
    const auto plane = [](int64_t count) {
      return RoundUp(count, 2 * kLine / kFloat) + kLine / kFloat;
    };
    filter_plane = plane(f.channels * kernels.panel);
    tile_plane = plane(block * f.channels);
    sum_plane = plane(block * kernels.panel);
    filters = RoundUp(f.channels, kLine / kFloat);
    packed = filters + panels * kPositions * filter_plane;
    packed_each = kPackedChannels * kTaps * kernels.panel;
    scratch = packed + packed_each * num_threads;
    scratch_each = kPositions * (tile_plane + sum_plane);
    size = scratch + workers * scratch_each;
  }

  int64_t block, blocks;  // tiles of a block, and how many blocks
  int64_t workers;
  int64_t filter_plane, tile_plane, sum_plane;
  int64_t filters;  // zeros come first
  int64_t packed, packed_each;
  int64_t scratch, scratch_each;
  int64_t size;
};

// Filters of `panel` output channels and `count` of input, to [count, 3, 3,
// panel].
void Pack(const Filtering& f, const float* w, int64_t panel, int64_t count,
          float* packed) {
  std::array<int64_t, kChannels> from;
  std::array<int64_t, kPackedChannels * kTaps> to;
  for (int64_t o = 0; o < panel; ++o) from[o] = o * f.w_out * kFloat;
  PermuteBlock block = {};
  block.x_offset = from.data();
  block.y_offset = to.data();
  block.rows = panel;
  block.bytes = kFloat;
  const auto move = [&](int64_t at, int64_t cols, int64_t first, int64_t step) {
    block.x = reinterpret_cast<const char*>(w + at);
    block.y = reinterpret_cast<char*>(packed);
    block.cols = cols;
    for (int64_t j = 0; j < cols; ++j) {
      to[j] = (first + j * step) * panel * kFloat;
    }
    FunctionsOf(BestIsa()).transpose[2](block);
  };
  if (f.w_col == 1 && f.w_row == 3 && f.w_in == kTaps) {
    move(0, count * kTaps, 0, 1);
    return;
  }
  for (int64_t tap = 0; tap < kTaps; ++tap) {
    const int64_t at = tap / 3 * f.w_row + tap % 3 * f.w_col;
    if (f.w_in == 1) {
      move(at, count, tap, kTaps);
      continue;
    }
    for (int64_t c = 0; c < count; ++c) {
      move(at + c * f.w_in, 1, c * kTaps + tap, 1);
    }
  }
}

// A panel's filters, transformed.
void TransformFilters(const Filtering& f, const WinogradKernels& kernels,
                      const float* w, float* packed, float* u, int64_t plane) {
  const auto transform = [&](const float* from, int64_t channel, int64_t row,
                             int64_t col, int64_t count, int64_t first) {
    if (!f.forward) {
      from += 2 * row + 2 * col;
      row = -row;
      col = -col;
    }
    kernels.filters(from, channel, row, col, count, u + first * kernels.panel,
                    plane);
  };
  if (f.w_out == 1) {
    transform(w, f.w_in, f.w_row, f.w_col, f.channels, 0);
    return;
  }
  for (int64_t c = 0; c < f.channels; c += kPackedChannels) {
    Pack(f, w + c * f.w_in, kernels.panel, kPackedChannels, packed);
    transform(packed, kTaps * kernels.panel, 3 * kernels.panel, kernels.panel,
              kPackedChannels, c);
  }
}

}  // namespace

bool WinogradSupports(const ConvProblem& p) {
  const auto plain = [](const std::array<int64_t, 3>& a, int64_t value) {
    return a[1] == value && a[2] == value;
  };
  const bool image =
      p.in[0] == 1 && p.out[0] == 1 && p.kernel[0] == 1 && p.pad_low[0] == 0;
  return p.winograd && p.pass != ConvPass::kWeightGrad &&
         p.type == DType::kF32 && p.result == DType::kF32 && p.groups == 1 &&
         image && plain(p.kernel, 3) && plain(p.stride, 1) &&
         plain(p.dilation, 1) && p.x.block == 1 && p.y.block == 1 &&
         p.x.strides[1] == 1 && p.y.strides[1] == 1 &&
         p.in_channels % kChannels == 0 && p.out_channels % kChannels == 0 &&
         p.w_format.empty() && BestFloats() != Floats::kNone;
}

bool WinogradWorthwhile(const ConvProblem& p) {
  return Filtering(p).count >= 48;
}

int64_t WinogradWorkspace(const ConvProblem& problem, int num_threads) {
  const Filtering f(problem);
  return Cut(f, *KernelsOf(BestFloats()), num_threads).size * kFloat;
}

Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor) {
  return Winograd(problem, buffers, executor, BestFloats());
}

Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor, Floats floats) {
  const WinogradKernels* kernels = KernelsOf(floats);
  if (kernels == nullptr) {
    return Status::Error("conv: no vectors of this size on this machine.");
  }
  const Filtering f(problem);
  const Cut cut(f, *kernels, executor.num_threads());
  const int64_t panel = kernels->panel, panels = f.out_channels / panel;
  const auto* x = static_cast<const float*>(f.forward ? buffers.x : buffers.y);
  auto* y = static_cast<float*>(f.forward ? buffers.y : buffers.x);
  const auto* w = static_cast<const float*>(buffers.w);
  const auto* bias = static_cast<const float*>(buffers.bias);
  auto* memory = static_cast<float*>(buffers.workspace);
  const float* zeros = std::fill_n(memory, f.channels, 0.f) - f.channels;

  const int64_t filter_workers =
      std::min<int64_t>(panels, executor.num_threads());
  std::atomic<int64_t> next{0};
  executor.ParallelFor(filter_workers, [&](int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1)) < panels;) {
      TransformFilters(f, *kernels, w + i * panel * f.w_out,
                       memory + cut.packed + worker * cut.packed_each,
                       memory + cut.filters + i * kPositions * cut.filter_plane,
                       cut.filter_plane);
    }
  });

  next = 0;
  executor.ParallelFor(cut.workers, [&](int64_t worker) {
    float* v = memory + cut.scratch + worker * cut.scratch_each;
    float* m = v + kPositions * cut.tile_plane;
    for (int64_t i; (i = next.fetch_add(1)) < cut.blocks;) {
      const int64_t first = i * cut.block;
      const int64_t count = std::min(cut.block, f.count - first);
      const int64_t pieces = CeilDiv(count, kernels->most_rows);
      const int64_t step = panel / pieces;
      kernels->input(f.tiles, x, first, count, f.channels, zeros, v,
                     cut.tile_plane);
      for (int64_t j = 0; j < panels; ++j) {
        const float* u =
            memory + cut.filters + j * kPositions * cut.filter_plane;
        for (int64_t at = 0; at < kPositions; ++at) {
          for (int64_t k = 0; k < pieces; ++k) {
            const int64_t row = count * k / pieces;
            const int64_t rows = count * (k + 1) / pieces - row;
            kernels->product[rows - 1](
                v + at * cut.tile_plane + row * f.channels, f.channels,
                u + at * cut.filter_plane, f.channels,
                m + at * cut.sum_plane + row * panel, panel,
                u + (at + 1) * cut.filter_plane + f.channels * k * step, step);
          }
        }
        kernels->output(f.tiles, m, panel, cut.sum_plane, first, count, panel,
                        bias == nullptr ? nullptr : bias + j * panel,
                        problem.relu, y + j * panel);
      }
    }
  });
  return Status::Ok();
}

}  // namespace jax_layout
