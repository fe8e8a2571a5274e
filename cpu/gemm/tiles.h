// SPDX-License-Identifier: Apache-2.0
//
// A GEMM as tasks: for every step of the plan's loops, tiles of y, each one
// sequential product.
#ifndef JAX_LAYOUT_CPU_GEMM_TILES_H_
#define JAX_LAYOUT_CPU_GEMM_TILES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "core/arithmetic.h"
#include "core/gemm/problem.h"
#include "cpu/executor.h"
#include "cpu/gemm/finish.h"

namespace jax_layout {

// "512 x 64 x 128 bfloat16 -> float32": m, n, k and types, for errors.
inline std::string Text(const GemmProblem& problem) {
  auto name = [](DType type) {
    return std::string(kDTypeNames[static_cast<int>(type)]);
  };
  return std::to_string(problem.plan.m) + " x " +
         std::to_string(problem.plan.n) + " x " +
         std::to_string(problem.plan.k) + " " + name(problem.operands) +
         " -> " + name(problem.result);
}

struct GemmTiling {
  int64_t rows, cols;  // of a tile; the last ones have fewer
  int64_t row_tiles, col_tiles, steps;
  int64_t tasks() const { return row_tiles * col_tiles * steps; }
};

// What tiles are good for a library.
struct GemmTileRules {
  int64_t tasks_per_thread;
  int64_t min_rows, min_cols;  // tiles get no smaller by cutting
  bool rows_first;             // cut columns only where rows run out
};

// Halves tiles until there are enough, as long as a tile is worth waking up a
// thread, which takes about 50 us.
inline GemmTiling MakeGemmTiling(const GemmPlan& plan,
                                 const GemmTileRules& rules) {
  constexpr int64_t kMinProducts = int64_t{1} << 22;
  const int64_t wanted = rules.tasks_per_thread * ProcessorCount();
  GemmTiling t = {plan.m, plan.n, 1, 1, plan.Steps()};
  while (t.tasks() < wanted && t.rows * t.cols * plan.k >= 2 * kMinProducts) {
    const bool cut_rows = t.rows >= 2 * rules.min_rows;
    const bool cut_cols = t.cols >= 2 * rules.min_cols;
    if (!cut_rows && !cut_cols) break;
    if (cut_rows && (rules.rows_first || !cut_cols || t.rows >= t.cols)) {
      t.row_tiles *= 2;
    } else {
      t.col_tiles *= 2;
    }
    // Whole registers and cache lines, but for the last tile.
    t.rows = CeilDiv(CeilDiv(plan.m, t.row_tiles), 16) * 16;
    t.cols = CeilDiv(CeilDiv(plan.n, t.col_tiles), 64) * 64;
    t.rows = std::min(t.rows, plan.m);
    t.cols = std::min(t.cols, plan.n);
    t.row_tiles = CeilDiv(plan.m, t.rows);
    t.col_tiles = CeilDiv(plan.n, t.cols);
  }
  return t;
}

// A task's part of the buffers.
struct GemmTile {
  const char* a;
  const char* b;
  const char* bias;
  char* y;
  char* aux;
  int64_t rows, cols;
};

// Calls `fn(tile)` for every tile, on the pool, and sums rows of a where a tile
// is the first of its rows. Returns the first error of fn.
template <typename Fn>
Status ForEachGemmTile(const GemmProblem& problem, const GemmTiling& tiling,
                       const GemmBuffers& buffers, const Executor& executor,
                       const Fn& fn) {
  const GemmPlan& plan = problem.plan;
  const int64_t in = ItemSize(problem.operands);
  const int64_t out = ItemSize(problem.result);
  std::mutex mutex;
  Status first;
  executor.ParallelFor(tiling.tasks(), [&](int64_t task) {
    // Tiles of one step follow each other, those with the same columns first.
    const int64_t row = task % tiling.row_tiles * tiling.rows;
    task /= tiling.row_tiles;
    const int64_t col = task % tiling.col_tiles * tiling.cols;
    auto [a, b, y] = plan.At(task / tiling.col_tiles);
    a += row * (plan.a.transposed ? 1 : plan.a.ld);
    b += col * (plan.b.transposed ? plan.b.ld : 1);
    y += row * plan.y.ld + col;
    auto offset = [](const void* p, int64_t bytes) {
      return p ? static_cast<const char*>(p) + bytes : nullptr;
    };
    const GemmTile tile = {offset(buffers.a, a * in),
                           offset(buffers.b, b * in),
                           offset(buffers.bias, col * out),
                           const_cast<char*>(offset(buffers.y, y * out)),
                           const_cast<char*>(offset(buffers.aux, y * out)),
                           std::min(tiling.rows, plan.m - row),
                           std::min(tiling.cols, plan.n - col)};
    Status status = fn(tile);
    if (problem.sums && col == 0) {
      SumGemmRows(problem, buffers.a, row, tile.rows, buffers.sums);
    }
    if (!status.ok()) {
      std::lock_guard<std::mutex> lock(mutex);
      if (first.ok()) first = std::move(status);
    }
  });
  return first;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_TILES_H_
