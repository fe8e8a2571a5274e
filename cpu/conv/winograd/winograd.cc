// SPDX-License-Identifier: Apache-2.0
//
// What is smaller is transformed first, by all threads: the filters, or the
// tiles of a small image. Then each takes blocks of the other, whose transforms
// and products stay in its cache, while the first pass by. Of an infinity the
// transforms make NaN, inf - inf, and of numbers near the largest one infinity:
// tiles with such results are summed once more, plainly.
#include "cpu/conv/winograd/winograd.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/arithmetic.h"
#include "cpu/conv/winograd/kernels.h"

namespace jax_layout {
namespace {

constexpr int64_t kPositions = 16;  // of a transformed tile
constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLine = 64;
constexpr int64_t kChannels = 32;         // a multiple of every panel
constexpr int64_t kBlockBytes = 3 << 17;  // of transformed tiles, in L2
constexpr int64_t kLeastBlock = 32;       // tiles for which filters pass by

const Kernels<const WinogradKernels*> kKernels("winograd",
                                               {
#ifdef __x86_64__
                                                   {Isa::kAvx512,
                                                    &kWinogradAvx512},
                                                   {Isa::kAvx2, &kWinogradAvx2},
#elif defined(__aarch64__)
                                                   {Isa::kNeon, &kWinogradNeon},
#endif
                                               });

// The input gradient is a convolution of y with the filters turned round.
struct WinogradPlan {
  explicit WinogradPlan(const ConvProblem& p)
      : forward(p.pass == ConvPass::kForward),
        channels(forward ? p.in_channels : p.out_channels),
        out_channels(forward ? p.out_channels : p.in_channels),
        w{p.w.strides[forward ? 0 : 1], p.w.strides[forward ? 1 : 0],
          forward ? p.w.strides[3] : -p.w.strides[3],
          forward ? p.w.strides[4] : -p.w.strides[4]},
        w_first(forward ? 0 : -2 * (w.row + w.col)) {
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
  WinogradFilters w;
  int64_t w_first;  // where the first tap lies
  WinogradTiles tiles;
  int64_t count = 0;  // of tiles
};

// How the work is cut, and where what lies in the workspace, in floats.
struct Cut {
  Cut(const WinogradPlan& f, const WinogradKernels& kernels, int num_threads) {
    panels = f.out_channels / kernels.panel;
    filters_first = f.out_channels <= f.count;
    // Tiles that a worker transforms, or whose products with a panel it makes.
    const int64_t of_tile =
        kPositions * kFloat *
        (filters_first ? f.channels : 2 * int64_t{kernels.panel});
    const int64_t most = std::max(kBlockBytes / of_tile, kLeastBlock);
    workers = std::max(num_threads, 1);
    blocks = CeilDiv(f.count, most);
    if (filters_first && blocks > 1) blocks = RoundUp(blocks, workers);
    block = CeilDiv(f.count, blocks);
    blocks = CeilDiv(f.count, block);
    workers = std::min(workers, filters_first ? blocks : panels);
    // Planes an odd number of lines apart do not meet in the same cache sets.
    const auto plane = [](int64_t count) {
      return RoundUp(count, 2 * kLine / kFloat) + kLine / kFloat;
    };
    filter_plane = plane(f.channels * kernels.panel);
    tile_plane = plane((filters_first ? block : f.count) * f.channels);
    sum_plane = plane(block * kernels.panel);
    first = RoundUp(f.channels, kLine / kFloat);
    scratch = first +
              kPositions * (filters_first ? panels * filter_plane : tile_plane);
    scratch_each =
        kPositions * (sum_plane + (filters_first ? tile_plane : filter_plane));
    size = scratch + workers * scratch_each;
  }

  bool filters_first;
  int64_t panels;         // of filters
  int64_t block, blocks;  // tiles of a block, and how many blocks
  int64_t workers;
  int64_t filter_plane, tile_plane, sum_plane;
  int64_t first;  // what is transformed first; zeros come before it
  int64_t scratch, scratch_each;
  int64_t size;
};

}  // namespace

bool WinogradSupports(const ConvProblem& p, Isa isa) {
  const auto plain = [](const std::array<int64_t, 3>& a, int64_t value) {
    return a[1] == value && a[2] == value;
  };
  const bool image =
      p.in[0] == 1 && p.out[0] == 1 && p.kernel[0] == 1 && p.pad_low[0] == 0;
  return p.winograd && p.pass != ConvPass::kWeightGrad && p.groups == 1 &&
         image && plain(p.kernel, 3) && plain(p.stride, 1) &&
         plain(p.dilation, 1) && p.x.block == 1 && p.y.block == 1 &&
         p.x.strides[1] == 1 && p.y.strides[1] == 1 &&
         p.in_channels % kChannels == 0 && p.out_channels % kChannels == 0 &&
         p.w_format.empty() && kKernels.At(isa) != nullptr &&
         kKernels.At(isa)->steps(p.type, p.result) != nullptr;
}

bool WinogradSupports(const ConvProblem& p) {
  // With fewer, oneDNN is as fast where its filters are packed once.
  constexpr int64_t kLeastTiles = 48;
  return WinogradSupports(p, BestIsa()) && WinogradPlan(p).count >= kLeastTiles;
}

int64_t WinogradWorkspace(const ConvProblem& problem, int num_threads,
                          Isa isa) {
  const WinogradKernels* kernels = kKernels.At(isa);
  if (kernels == nullptr) return 0;
  return Cut(WinogradPlan(problem), *kernels, num_threads).size * kFloat;
}

int64_t WinogradWorkspace(const ConvProblem& problem, int num_threads) {
  return WinogradWorkspace(problem, num_threads, BestIsa());
}

Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor) {
  return Winograd(problem, buffers, executor, BestIsa());
}

Status Winograd(const ConvProblem& problem, const ConvBuffers& buffers,
                const Executor& executor, Isa isa) {
  const WinogradKernels* kernels = kKernels.Take(isa);
  if (kernels == nullptr) {
    return Status::Error("conv: no vectors of this size on this machine.");
  }
  const WinogradPlan f(problem);
  const Cut cut(f, *kernels, executor.num_threads());
  const int64_t panel = kernels->panel;
  const WinogradSteps& steps = *kernels->steps(problem.type, problem.result);
  const int64_t item = ItemSize(problem.type);
  const int64_t y_item = ItemSize(problem.result);
  const void* x = f.forward ? buffers.x : buffers.y;
  auto* y = static_cast<char*>(f.forward ? buffers.y : buffers.x);
  const auto* w = static_cast<const char*>(buffers.w) + f.w_first * item;
  const auto* bias = static_cast<const char*>(buffers.bias);
  auto* memory = static_cast<float*>(buffers.workspace);
  const float* zeros = std::fill_n(memory, f.channels, 0.f) - f.channels;
  float* first = memory + cut.first;

  const auto filters = [&](int64_t j, float* u) {
    steps.filters(f.w, w + j * panel * f.w.out * item, f.channels, u,
                  cut.filter_plane);
  };
  const auto tiles = [&](int64_t from, int64_t count, float* v) {
    steps.input(f.tiles, x, from, count, f.channels, zeros, v, cut.tile_plane);
  };
  const auto size = [&](int64_t i) {
    return std::min(cut.block, f.count - i * cut.block);
  };
  // What block i, of tiles v, and panel j, of filters u, make of y, by m.
  const auto multiply = [&](int64_t i, int64_t j, const float* v,
                            const float* u, float* m) {
    const int64_t from = i * cut.block, count = size(i);
    const int64_t pieces = CeilDiv(count, kernels->most_rows);
    const int64_t step = panel / pieces;
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
    const void* add = bias == nullptr ? nullptr : bias + j * panel * y_item;
    void* to = y + j * panel * y_item;
    const auto finite = [&](int64_t t, int64_t some) {
      return steps.output(f.tiles, m + t * panel, panel, cut.sum_plane,
                          from + t, some, panel, add, problem.relu, to) == 0;
    };
    if (finite(0, count)) return;
    for (int64_t t = 0; t < count; ++t) {
      if (finite(t, 1)) continue;
      steps.plain(f.tiles, x, from + t, f.channels, zeros, f.w,
                  w + j * panel * f.w.out * item, add, problem.relu, to);
    }
  };

  if (cut.filters_first) {
    const int64_t of_panel = kPositions * cut.filter_plane;
    executor.ParallelFor(cut.panels,
                         [&](int64_t j) { filters(j, first + j * of_panel); });
    executor.ParallelForWorkers(
        cut.blocks, cut.workers, [&](int64_t i, int64_t worker) {
          float* v = memory + cut.scratch + worker * cut.scratch_each;
          float* m = v + kPositions * cut.tile_plane;
          tiles(i * cut.block, size(i), v);
          for (int64_t j = 0; j < cut.panels; ++j) {
            multiply(i, j, v, first + j * of_panel, m);
          }
        });
    return Status::Ok();
  }
  executor.ParallelFor(f.count,
                       [&](int64_t t) { tiles(t, 1, first + t * f.channels); });
  executor.ParallelForWorkers(
      cut.panels, cut.workers, [&](int64_t j, int64_t worker) {
        float* u = memory + cut.scratch + worker * cut.scratch_each;
        float* m = u + kPositions * cut.filter_plane;
        filters(j, u);
        for (int64_t i = 0; i < cut.blocks; ++i) {
          multiply(i, j, first + i * cut.block * f.channels, u, m);
        }
      });
  return Status::Ok();
}

}  // namespace jax_layout
