// SPDX-License-Identifier: Apache-2.0
//
// Chooses a kernel family, plans it, launches it. See docs/permute.md for the
// decision tree.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda/permute/copy.cuh"
#include "cuda/permute/packed.cuh"
#include "cuda/permute/permute.h"
#include "cuda/permute/rows.cuh"
#include "cuda/permute/tile.cuh"

namespace jax_layout {
namespace {

// From this size on a chunk moves by itself: full 32-byte sectors, and most
// of a 128-byte line with its neighbour.
constexpr int64_t kRowBytes = 64;

// The largest power of two, up to limit, that divides n.
int PowerOfTwo(int64_t n, int64_t limit) {
  n |= limit;
  return static_cast<int>(n & -n);
}

PermuteKernel ChooseRows(const PermutePlan& plan, int unit, int alignment) {
  const bool words = unit < 4 && alignment >= 4 && plan.chunk >= kRowBytes;
  if (plan.size / unit <= kMaxCount32 &&
      plan.rank <= RowsParams<uint32_t>::kMaxDims) {
    return {plan, PlanRows<uint32_t>(plan, unit, words)};
  }
  return {plan, PlanRows<uint64_t>(plan, unit, words)};
}

// Fails only by what the runtime reports.
template <typename Params>
Status Launch(void (*kernel)(Params, const char*, char*), int64_t blocks,
              int threads, int shared_bytes,
              const std::type_identity_t<Params>& params, const void* x,
              void* y, cudaStream_t stream) {
  if (blocks > INT32_MAX) {
    return Status::Error("permute: x is too large for one launch, got " +
                         std::to_string(blocks) + " blocks.");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, params, static_cast<const char*>(x),
                         static_cast<char*>(y));
  if (error == cudaSuccess) return Status::Ok();
  (void)cudaGetLastError();  // ours to report, not the next caller's
  return Status::Error(std::string("permute: the launch failed: ") +
                       cudaGetErrorString(error) + ".");
}

// Of the current device; of an H100 if the runtime does not say.
int Multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) ==
          cudaSuccess) {
    return count;
  }
  (void)cudaGetLastError();
  return 132;
}

Status Unsupported() {
  return Status::Error("permute: no kernel for this plan.");
}

struct Launcher {
  const void* x;
  void* y;
  cudaStream_t stream;

  Status operator()(const CopyParams& p) const {
    const auto launch = [&](auto kernel) {
      return Launch(kernel, CopyBlocks(p), kCopyThreads, 0, p, x, y, stream);
    };
    switch (p.unit) {
      case 1:
        return launch(CopyKernel<1>);
      case 2:
        return launch(CopyKernel<2>);
      case 4:
        return launch(CopyKernel<4>);
      case 8:
        return launch(CopyKernel<8>);
      case 16:
        return launch(CopyKernel<16>);
    }
    return Unsupported();
  }

  template <typename UInt>
  Status operator()(const RowsParams<UInt>& p) const {
    const auto launch = [&]<int kUnit>(std::integral_constant<int, kUnit>) {
      if constexpr (kUnit < 4) {
        if (p.words) {
          return Launch(RowWordsKernel<kUnit, UInt>, RowsBlocks(p),
                        kRowsThreads<UInt>, 0, p, x, y, stream);
        }
      }
      return Launch(RowsKernel<kUnit, UInt>, RowsBlocks(p), kRowsThreads<UInt>,
                    0, p, x, y, stream);
    };
    switch (p.unit) {
      case 1:
        return launch(std::integral_constant<int, 1>());
      case 2:
        return launch(std::integral_constant<int, 2>());
      case 4:
        return launch(std::integral_constant<int, 4>());
      case 8:
        return launch(std::integral_constant<int, 8>());
      case 16:
        return launch(std::integral_constant<int, 16>());
    }
    return Unsupported();
  }

  template <int kElement, int kLoad, int kStore, int kEdge, int kThreads>
  Status LaunchTile(const TileParams& p) const {
    return Launch(TileKernel<kElement, kLoad, kStore, kEdge, kThreads>, p.tiles,
                  kThreads,
                  Tile<kElement, kLoad, kStore, kEdge, kThreads>::kSharedBytes,
                  p, x, y, stream);
  }

  Status operator()(const TileParams& p) const {
    const auto key = [](int element, int load, int store, int edge) {
      return ((element * 32 + load) * 32 + store) * 256 + edge;
    };
    switch (key(p.element, p.load, p.store, p.edge)) {
      case key(1, 16, 16, 128):
        return LaunchTile<1, 16, 16, 128, 64>(p);
      case key(1, 16, 4, 128):
        return LaunchTile<1, 16, 4, 128, 64>(p);
      case key(1, 4, 16, 128):
        return LaunchTile<1, 4, 16, 128, 256>(p);
      case key(1, 4, 4, 128):
        return LaunchTile<1, 4, 4, 128, 256>(p);
      case key(1, 1, 16, 128):
        return LaunchTile<1, 1, 16, 128, 256>(p);
      case key(1, 1, 4, 128):
        return LaunchTile<1, 1, 4, 128, 256>(p);
      case key(2, 16, 16, 64):
        return LaunchTile<2, 16, 16, 64, 64>(p);
      case key(2, 16, 4, 64):
        return LaunchTile<2, 16, 4, 64, 64>(p);
      case key(2, 4, 16, 64):
        return LaunchTile<2, 4, 16, 64, 256>(p);
      case key(2, 4, 4, 64):
        return LaunchTile<2, 4, 4, 64, 256>(p);
      case key(2, 2, 16, 64):
        return LaunchTile<2, 2, 16, 64, 256>(p);
      case key(2, 2, 4, 64):
        return LaunchTile<2, 2, 4, 64, 256>(p);
      case key(4, 16, 16, 64):
        return LaunchTile<4, 16, 16, 64, 256>(p);
      case key(4, 16, 4, 64):
        return LaunchTile<4, 16, 4, 64, 256>(p);
      case key(4, 4, 16, 64):
        return LaunchTile<4, 4, 16, 64, 256>(p);
      case key(4, 4, 4, 64):
        return LaunchTile<4, 4, 4, 64, 256>(p);
      case key(8, 16, 16, 32):
        return LaunchTile<8, 16, 16, 32, 128>(p);
      case key(8, 16, 8, 32):
        return LaunchTile<8, 16, 8, 32, 128>(p);
      case key(8, 8, 16, 32):
        return LaunchTile<8, 8, 16, 32, 256>(p);
      case key(8, 8, 8, 32):
        return LaunchTile<8, 8, 8, 32, 256>(p);
      case key(4, 16, 16, 32):
        return LaunchTile<4, 16, 16, 32, 64>(p);
      case key(16, 16, 16, 32):
        return LaunchTile<16, 16, 16, 32, 256>(p);
      case key(16, 16, 16, 16):
        return LaunchTile<16, 16, 16, 16, 64>(p);
    }
    return Unsupported();
  }

  template <int kElement>
  Status LaunchPacked(const PackedParams& p) const {
    constexpr int kThreads = PackedThreads(kElement);
    auto kernel = PackedKernel<kElement, kThreads, uint32_t>;
    if constexpr (!IsTriple(kElement)) {
      if (p.wide) kernel = PackedKernel<kElement, kThreads, uint64_t>;
    }
    if constexpr (kElement == 1) {
      if (p.threads == kPackedPatchThreads) {
        kernel = PackedKernel<1, kPackedPatchThreads, uint32_t>;
      } else if (p.threads == kPackedLargeThreads) {
        kernel = PackedKernel<1, kPackedLargeThreads, uint32_t>;
      }
    }
    const int wave = Multiprocessors() * PackedResident(p.threads);
    return Launch(kernel, std::min<int64_t>(p.tiles, wave), p.threads,
                  p.shared_bytes, p, x, y, stream);
  }

  Status operator()(const PackedParams& p) const {
    switch (p.element) {
      case 1:
        return LaunchPacked<1>(p);
      case 2:
        return LaunchPacked<2>(p);
      case 3:
        return LaunchPacked<3>(p);
      case 4:
        return LaunchPacked<4>(p);
      case 6:
        return LaunchPacked<6>(p);
      case 8:
        return LaunchPacked<8>(p);
      case 16:
        return LaunchPacked<16>(p);
    }
    return Unsupported();
  }
};

}  // namespace

PermuteKernel ChoosePermuteKernel(const PermutePlan& plan, int alignment) {
  if (plan.rank == 0) return {plan, CopyParams{alignment, plan.size}};
  const int unit = PowerOfTwo(plan.chunk, alignment);
  if (plan.chunk >= kRowBytes) return ChooseRows(plan, unit, alignment);
  if (plan.chunk == unit && FitsTile(plan)) {
    const TileParams p = PlanTile(plan, alignment);
    if (p.tiles > 0) return {plan, p};
  } else {
    const PackedParams p = PlanPacked(plan, unit, alignment);
    if (p.tiles > 0) return {plan, p};
  }
  // More tiles than 32 bits count: beyond any device's memory, yet correct.
  return ChooseRows(plan, unit, alignment);
}

Status Permute(const PermuteKernel& kernel, const void* x, void* y,
               cudaStream_t stream) {
  const Launcher launcher = {x, y, stream};
  const auto bits =
      reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y);
  const int alignment = PowerOfTwo(static_cast<int64_t>(bits), 16);
  if (alignment == 16) return std::visit(launcher, kernel.params);
  // Rare: buffers cut from the middle of others. Planning takes microseconds.
  return std::visit(launcher,
                    ChoosePermuteKernel(kernel.plan, alignment).params);
}

}  // namespace jax_layout
