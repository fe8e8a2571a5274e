// SPDX-License-Identifier: Apache-2.0
//
// The filters are transformed first, by all threads. Then each takes blocks of
// tiles, whose transforms and products stay in its cache, while the filters
// pass by. Of an infinity the transforms make NaN, inf - inf, and of numbers
// near the largest one infinity: tiles with such results are summed once more,
// plainly.
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
    scratch = filters + panels * kPositions * filter_plane;
    scratch_each = kPositions * (tile_plane + sum_plane);
    size = scratch + workers * scratch_each;
  }

  int64_t block, blocks;  // tiles of a block, and how many blocks
  int64_t workers;
  int64_t filter_plane, tile_plane, sum_plane;
  int64_t filters;  // zeros come first
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
  // With fewer, the transform of the filters takes what the products save.
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
  const int64_t panel = kernels->panel, panels = f.out_channels / panel;
  const WinogradSteps& steps = *kernels->steps(problem.type, problem.result);
  const int64_t item = ItemSize(problem.type);
  const int64_t y_item = ItemSize(problem.result);
  const void* x = f.forward ? buffers.x : buffers.y;
  auto* y = static_cast<char*>(f.forward ? buffers.y : buffers.x);
  const auto* w = static_cast<const char*>(buffers.w) + f.w_first * item;
  const auto* bias = static_cast<const char*>(buffers.bias);
  auto* memory = static_cast<float*>(buffers.workspace);
  const float* zeros = std::fill_n(memory, f.channels, 0.f) - f.channels;

  executor.ParallelFor(panels, [&](int64_t i) {
    steps.filters(f.w, w + i * panel * f.w.out * item, f.channels,
                  memory + cut.filters + i * kPositions * cut.filter_plane,
                  cut.filter_plane);
  });

  executor.ParallelForWorkers(
      cut.blocks, cut.workers, [&](int64_t i, int64_t worker) {
        float* v = memory + cut.scratch + worker * cut.scratch_each;
        float* m = v + kPositions * cut.tile_plane;
        const int64_t first = i * cut.block;
        const int64_t count = std::min(cut.block, f.count - first);
        const int64_t pieces = CeilDiv(count, kernels->most_rows);
        const int64_t step = panel / pieces;
        steps.input(f.tiles, x, first, count, f.channels, zeros, v,
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
                  u + (at + 1) * cut.filter_plane + f.channels * k * step,
                  step);
            }
          }
          const void* add =
              bias == nullptr ? nullptr : bias + j * panel * y_item;
          void* to = y + j * panel * y_item;
          const auto finite = [&](int64_t t, int64_t tiles) {
            return steps.output(f.tiles, m + t * panel, panel, cut.sum_plane,
                                first + t, tiles, panel, add, problem.relu,
                                to) == 0;
          };
          if (finite(0, count)) continue;
          for (int64_t t = 0; t < count; ++t) {
            if (finite(t, 1)) continue;
            steps.plain(f.tiles, x, first + t, f.channels, zeros, f.w,
                        w + j * panel * f.w.out * item, add, problem.relu, to);
          }
        }
      });
  return Status::Ok();
}

}  // namespace jax_layout
