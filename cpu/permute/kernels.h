// SPDX-License-Identifier: Apache-2.0
//
// The block functions, written once over a vector type and included by one
// source file per instruction set. Everything is in an unnamed namespace and
// calls nothing inline from elsewhere: each file keeps its own machine code.
//
// A vector type V, of L lanes of 16 bytes, offers
//
//   Reg, kBytes         16 * L
//   Load, Store         any alignment
//   Stream              a non-temporal store, aligned
//   Low<W>, High<W>     interleave the low (high) halves of each lane, in
//                       elements of W bytes
//   TransposeLanes      L registers seen as an L x L matrix of lanes
//   LoadLanes           lane l from x + at[l * step]
//   CopyPart            fewer than 64 bytes
//   kMasks              whether LoadPart and StorePart are cheap; if not,
//                       blocks smaller than a tile move element by element
//   Half                if there is one, a vector for blocks of half a tile
#include <cstdint>
#include <cstring>

#include "cpu/inline.h"
#include "cpu/permute/block.h"

namespace jax_layout {
namespace {

template <int N>
struct Count {
  static constexpr int kCount = N;
};

template <int W>
JAX_LAYOUT_INLINE void MoveElement(char* y, const char* x) {
  std::memcpy(y, x, W);
}

// Moves bytes in [S, 2 * S] as two overlapping pieces: all are loaded before
// any is stored, and nothing outside is touched.
template <int S>
JAX_LAYOUT_INLINE void MoveTwice(char* y, const char* x, int64_t bytes) {
  char head[S], tail[S];
  std::memcpy(head, x, S);
  std::memcpy(tail, x + bytes - S, S);
  std::memcpy(y, head, S);
  std::memcpy(y + bytes - S, tail, S);
}

// Fewer bytes than a line.
JAX_LAYOUT_INLINE void CopyShort(char* y, const char* x, int64_t bytes) {
  if (bytes >= 32) return MoveTwice<32>(y, x, bytes);
  if (bytes >= 16) return MoveTwice<16>(y, x, bytes);
  if (bytes >= 8) return MoveTwice<8>(y, x, bytes);
  if (bytes >= 4) return MoveTwice<4>(y, x, bytes);
  if (bytes >= 2) return MoveTwice<2>(y, x, bytes);
  if (bytes == 1) *y = *x;
}

template <class V, bool kStream>
JAX_LAYOUT_INLINE void CopyLines(char* y, const char* x, int64_t lines) {
  for (int64_t at = 0; at < lines * 64; at += V::kBytes) {
    if constexpr (kStream) {
      V::Stream(y + at, V::Load(x + at));
    } else {
      V::Store(y + at, V::Load(x + at));
    }
  }
}

// Non-temporal stores write whole lines of y; its ragged ends go through the
// cache, where the neighbouring run completes them.
template <class V, bool kStream>
JAX_LAYOUT_INLINE void Copy(char* y, const char* x, int64_t bytes) {
  if constexpr (kStream) {
    int64_t head = -reinterpret_cast<intptr_t>(y) & 63;
    if (head > bytes) head = bytes;
    V::CopyPart(y, x, head);
    y += head;
    x += head;
    bytes -= head;
  }
  const int64_t lines = bytes / 64;
  CopyLines<V, kStream>(y, x, lines);
  V::CopyPart(y + lines * 64, x + lines * 64, bytes % 64);
}

template <class V>
void DrainStage(const PermuteBlock& b) {
  const int64_t column = b.rows * b.bytes;
  for (int64_t j = 0; j < b.cols; j += b.run_cols) {
    const int64_t cols = j + b.run_cols <= b.cols ? b.run_cols : b.cols - j;
    char* const y = b.y + b.y_offset[j];
    const char* const x = b.stage + b.stage_offset[j];
    if (b.stream) {
      Copy<V, true>(y, x, cols * column);
    } else {
      Copy<V, false>(y, x, cols * column);
    }
  }
}

// Transposes a lane-wide matrix in each lane of r[0..16 / W): every round
// interleaves the first half of the registers with the second.
template <class V, int W>
JAX_LAYOUT_INLINE void TransposeInLanes(typename V::Reg* r) {
  constexpr int kRows = 16 / W;
  if constexpr (kRows > 1) {
#pragma GCC unroll 4
    for (int round = 1; round < kRows; round *= 2) {
      typename V::Reg t[kRows];
#pragma GCC unroll 16
      for (int k = 0; k < kRows / 2; ++k) {
        t[2 * k] = V::template Low<W>(r[k], r[k + kRows / 2]);
        t[2 * k + 1] = V::template High<W>(r[k], r[k + kRows / 2]);
      }
#pragma GCC unroll 16
      for (int k = 0; k < kRows; ++k) r[k] = t[k];
    }
  }
}

// How a tile reads row i, at x + at[i], and writes column j, at y + at[j].
template <class V>
struct WholeVectors {
  JAX_LAYOUT_INLINE typename V::Reg Load(const char* x, const int64_t* at,
                                         int i) const {
    return V::Load(x + at[i]);
  }
  JAX_LAYOUT_INLINE void Store(char* y, const int64_t* at, int j,
                               typename V::Reg v) const {
    V::Store(y + at[j], v);
  }
};

template <class V>
struct StreamedVectors : WholeVectors<V> {
  JAX_LAYOUT_INLINE void Store(char* y, const int64_t* at, int j,
                               typename V::Reg v) const {
    V::Stream(y + at[j], v);
  }
};

template <class V, int W>
struct PartVectors {
  int rows, cols;

  JAX_LAYOUT_INLINE typename V::Reg Load(const char* x, const int64_t* at,
                                         int i) const {
    return i < rows ? V::LoadPart(x + at[i], cols * W) : V::Zero();
  }
  JAX_LAYOUT_INLINE void Store(char* y, const int64_t* at, int j,
                               typename V::Reg v) const {
    if (j < cols) V::StorePart(y + at[j], v, rows * W);
  }
};

// Chunks a little smaller than the elements of the tile: a byte permute pads
// them on the way in, another packs them again.
template <class V, int W>
struct PackedVectors {
  typename V::Reg pad, pack;
  int chunk;
  int rows = 0, cols = 0;

  explicit JAX_LAYOUT_INLINE PackedVectors(int64_t bytes) : chunk(bytes) {
    char p[V::kBytes], q[V::kBytes] = {};
    for (int k = 0; k < V::kBytes; ++k) {
      p[k] = static_cast<char>(k / W * chunk + k % W);
      if (k % W < chunk) q[k / W * chunk + k % W] = static_cast<char>(k);
    }
    pad = V::Load(p);
    pack = V::Load(q);
  }
  JAX_LAYOUT_INLINE typename V::Reg Load(const char* x, const int64_t* at,
                                         int i) const {
    return i < rows ? V::Permute(pad, V::LoadPart(x + at[i], cols * chunk))
                    : V::Zero();
  }
  JAX_LAYOUT_INLINE void Store(char* y, const int64_t* at, int j,
                               typename V::Reg v) const {
    if (j < cols) V::StorePart(y + at[j], V::Permute(pack, v), rows * chunk);
  }
};

// A tile of V::kBytes x V::kBytes. Lane l of a row holds its columns
// [l * 16 / W, (l + 1) * 16 / W); after the transposes in lanes, register k of
// row group g holds in lane l column l * 16 / W + k of that group, so the
// registers k of all groups are one more transpose away from whole columns.
template <class V, int W, class Vectors>
JAX_LAYOUT_INLINE void Tile(const Vectors& vectors, const char* x,
                            const int64_t* x_offset, char* y,
                            const int64_t* y_offset) {
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kBytes / 16;
  constexpr int kGroup = 16 / W;
  Reg r[kGroup][kLanes];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes; ++g) {
    Reg group[kGroup];
#pragma GCC unroll 16
    for (int k = 0; k < kGroup; ++k) {
      const int i = g * kGroup + k;
      group[k] = vectors.Load(x, x_offset, i);
    }
    TransposeInLanes<V, W>(group);
#pragma GCC unroll 16
    for (int k = 0; k < kGroup; ++k) r[k][g] = group[k];
  }
#pragma GCC unroll 16
  for (int k = 0; k < kGroup; ++k) {
    V::TransposeLanes(r[k]);
#pragma GCC unroll 4
    for (int l = 0; l < kLanes; ++l) {
      const int j = l * kGroup + k;
      vectors.Store(y, y_offset, j, r[k][l]);
    }
  }
}

// A tile of whole columns, but only one lane of each row: the load puts lane l
// of register k from row l * kGroup + k.
template <class V, int W, class Vectors>
JAX_LAYOUT_INLINE void NarrowTile(const Vectors& vectors, const char* x,
                                  const int64_t* x_offset, char* y,
                                  const int64_t* y_offset) {
  constexpr int kGroup = 16 / W;
  typename V::Reg r[kGroup];
#pragma GCC unroll 16
  for (int k = 0; k < kGroup; ++k) {
    r[k] = V::LoadLanes(x, x_offset + k, kGroup);
  }
  TransposeInLanes<V, W>(r);
#pragma GCC unroll 16
  for (int k = 0; k < kGroup; ++k) vectors.Store(y, y_offset, k, r[k]);
}

// Calls tile(i, j) for every tile of kRows x kCols in the block, less at the
// ends. Tiles are done in strips of rows: the tiles of a strip write
// neighbouring lines of y one after the other. Meanwhile the next lines of the
// strip's rows, which here or in the block to come are the next columns, are
// fetched into the second-level cache. Tiles of 1- and 2-byte elements have 32
// rows or more, enough for a strip, and take longer.
template <int W, int kRows, int kCols, class Fn>
JAX_LAYOUT_INLINE void ForEachTile(const PermuteBlock& b, const Fn& tile) {
  constexpr int64_t kStrip = kRows * (W >= 4 ? 2 : 1);
  constexpr int64_t kAhead = W >= 4 ? 128 : 64;
  for (int64_t strip = 0; strip < b.rows; strip += kStrip) {
    const int64_t end = strip + kStrip < b.rows ? strip + kStrip : b.rows;
    for (int64_t j = 0; j < b.cols; j += kCols) {
      for (int64_t i = strip; i < end; i += kRows) {
        const char* ahead = b.x + j * b.bytes + kAhead;
        for (int64_t k = i; k < i + kRows && k < end; ++k) {
          __builtin_prefetch(ahead + b.x_offset[k], 0, 2);
        }
        tile(i, j);
      }
    }
  }
}

// Whether there is a smaller vector, of four chunks or more.
template <class V, int W>
constexpr bool HasHalf() {
  if constexpr (requires { typename V::Half; }) {
    return W * 4 <= V::Half::kBytes;
  }
  return false;
}

// To y, or to the stage if there is one.
template <class V, int W>
void Transpose(const PermuteBlock& b) {
  constexpr int kTile = V::kBytes / W;
  constexpr int kNarrow = 16 / W;
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  const bool stream = b.stream && b.stage == nullptr;
  // The last tile of a row or column overlaps the one before.
  auto tiles = [&](auto cols, auto run) JAX_LAYOUT_LAMBDA {
    constexpr int kCols = decltype(cols)::kCount;
    ForEachTile<W, kTile, kCols>(
        b, [&](int64_t i, int64_t j) JAX_LAYOUT_LAMBDA {
          const bool aligned = i <= b.rows - kTile;
          if (!aligned) i = b.rows - kTile;
          if (j > b.cols - kCols) j = b.cols - kCols;
          if (stream && aligned) {
            run(StreamedVectors<V>{}, b.x + j * W, b.x_offset + i, y + i * W,
                y_offset + j);
          } else {
            run(WholeVectors<V>{}, b.x + j * W, b.x_offset + i, y + i * W,
                y_offset + j);
          }
        });
  };
  if (b.rows >= kTile && b.cols >= kTile) {
    tiles(Count<kTile>{},
          [](auto... args) JAX_LAYOUT_LAMBDA { Tile<V, W>(args...); });
  } else if (b.rows >= kTile && b.cols >= kNarrow) {
    tiles(Count<kNarrow>{},
          [](auto... args) JAX_LAYOUT_LAMBDA { NarrowTile<V, W>(args...); });
  } else if (HasHalf<V, W>() &&
             (!V::kMasks || b.rows <= kTile / 2 || b.cols <= kTile / 2)) {
    // Less than half a tile would be used, or none could be.
    if constexpr (HasHalf<V, W>()) Transpose<typename V::Half, W>(b);
  } else if constexpr (V::kMasks) {
    PartVectors<V, W> part;
    ForEachTile<W, kTile, kTile>(b, [&](int64_t i,
                                        int64_t j) JAX_LAYOUT_LAMBDA {
      part.rows = b.rows - i < kTile ? b.rows - i : kTile;
      part.cols = b.cols - j < kTile ? b.cols - j : kTile;
      Tile<V, W>(part, b.x + j * W, b.x_offset + i, y + i * W, y_offset + j);
    });
  } else {
    for (int64_t i = 0; i < b.rows; ++i) {
      const char* x = b.x + b.x_offset[i];
      for (int64_t j = 0; j < b.cols; ++j) {
        MoveElement<W>(y + y_offset[j] + i * W, x + j * W);
      }
    }
  }
}

template <class V, int W>
void TransposeBlock(const PermuteBlock& b) {
  Transpose<V, W>(b);
  if (b.stage) DrainStage<V>(b);
}

template <class V, int W>
void PackedBlock(const PermuteBlock& b) {
  constexpr int kTile = V::kBytes / W;
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  PackedVectors<V, W> packed(b.bytes);
  ForEachTile<W, kTile, kTile>(b, [&](int64_t i, int64_t j) JAX_LAYOUT_LAMBDA {
    packed.rows = b.rows - i < kTile ? b.rows - i : kTile;
    packed.cols = b.cols - j < kTile ? b.cols - j : kTile;
    Tile<V, W>(packed, b.x + j * b.bytes, b.x_offset + i, y + i * b.bytes,
               y_offset + j);
  });
  if (b.stage) DrainStage<V>(b);
}

// Along y first: the writes are one run after another, and reads of scattered
// runs cost less than writes.
template <class Fn>
JAX_LAYOUT_INLINE void ForEachChunk(const PermuteBlock& b, const Fn& copy) {
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  for (int64_t j = 0; j < b.cols; ++j) {
    const char* x = b.x + j * b.bytes;
    for (int64_t i = 0; i < b.rows; ++i) {
      copy(y + y_offset[j] + i * b.bytes, x + b.x_offset[i]);
    }
  }
}

template <int S>
void MoveChunks(const PermuteBlock& b) {
  const int64_t bytes = b.bytes;
  ForEachChunk(b, [=](char* y, const char* x)
                      JAX_LAYOUT_LAMBDA { MoveTwice<S>(y, x, bytes); });
}

template <class V>
void MoveBlock(const PermuteBlock& b) {
  if (b.bytes >= 32) {
    MoveChunks<32>(b);
  } else if (b.bytes >= 16) {
    MoveChunks<16>(b);
  } else if (b.bytes >= 8) {
    MoveChunks<8>(b);
  } else if (b.bytes >= 4) {
    MoveChunks<4>(b);
  } else {
    MoveChunks<2>(b);  // 3 bytes
  }
  if (b.stage) DrainStage<V>(b);
}

template <class V>
void CopyBlock(const PermuteBlock& b) {
  const int64_t bytes = b.bytes;
  const int64_t lines = bytes / 64;
  if (!b.stream || b.stage != nullptr) {
    ForEachChunk(b, [&](char* y, const char* x)
                        JAX_LAYOUT_LAMBDA { Copy<V, false>(y, x, bytes); });
  } else if (bytes % 64 == 0 && reinterpret_cast<intptr_t>(b.y) % 64 == 0) {
    ForEachChunk(b, [&](char* y, const char* x)
                        JAX_LAYOUT_LAMBDA { CopyLines<V, true>(y, x, lines); });
  } else {
    ForEachChunk(b, [&](char* y, const char* x)
                        JAX_LAYOUT_LAMBDA { Copy<V, true>(y, x, bytes); });
  }
  if (b.stage) DrainStage<V>(b);
}

// How far ahead of its windows a program fetches x: the hardware stops at every
// page, and each run of x is a stream of its own.
constexpr int64_t kFetchAhead = 2048;

template <class V, bool kWhole>
void RepeatShuffle(const ShuffleRun& run) {
  const char* x = run.x;
  char* y = run.y;
  int64_t ahead = 0;
  while (ahead * run.x_step < kFetchAhead && ahead < run.repeat) ++ahead;
  ahead *= run.x_step;
  for (int64_t n = 0; n < run.repeat; ++n) {
    for (int64_t l = 0; l < run.num_lines; ++l) {
      __builtin_prefetch(x + ahead + run.lines[l], 0, 2);
    }
    const ShuffleProgram::Window* w = run.windows;
    for (int64_t o = 0; o < run.num_outputs; ++o) {
      const ShuffleProgram::Output& output = run.outputs[o];
      typename V::Reg v = V::Zero();
      for (int64_t k = 0; k < output.num_windows; ++k, ++w) {
        v = V::Shuffle(v, w->index,
                       kWhole ? V::Load(x + w->x_offset)
                              : V::LoadPart(x + w->x_offset, w->bytes));
      }
      char* to = y + output.y_offset;
      if (!kWhole && output.bytes < V::kBytes) {
        V::StorePart(to, v, output.bytes);
      } else if (run.stream &&
                 reinterpret_cast<intptr_t>(to) % V::kBytes == 0) {
        V::Stream(to, v);
      } else {
        V::Store(to, v);
      }
    }
    x += run.x_step;
    y += run.y_step;
  }
}

template <class V>
void RunShuffle(const ShuffleRun& run) {
  if (run.whole) {
    RepeatShuffle<V, true>(run);
  } else {
    RepeatShuffle<V, false>(run);
  }
}

}  // namespace
}  // namespace jax_layout
