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
//   kMasks              whether LoadPart and StorePart are cheap; if not,
//                       blocks smaller than a tile move element by element
#include <cstdint>
#include <cstring>

#include "cpu/permute_block.h"

namespace jax_layout {
namespace {

#define JAX_LAYOUT_INLINE inline __attribute__((always_inline))

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

template <class V>
JAX_LAYOUT_INLINE void CopyLines(char* y, const char* x, int64_t lines,
                                 bool stream) {
  constexpr int kPerLine = 64 / V::kBytes;
  if (stream) {
    for (int64_t v = 0; v < lines * kPerLine; ++v) {
      V::Stream(y + v * V::kBytes, V::Load(x + v * V::kBytes));
    }
  } else {
    for (int64_t v = 0; v < lines * kPerLine; ++v) {
      V::Store(y + v * V::kBytes, V::Load(x + v * V::kBytes));
    }
  }
}

// Non-temporal stores write whole lines of y; its ragged ends go through the
// cache, where the neighbouring run completes them.
template <class V>
JAX_LAYOUT_INLINE void Copy(char* y, const char* x, int64_t bytes,
                            bool stream) {
  if (stream) {
    int64_t head = -reinterpret_cast<intptr_t>(y) & 63;
    if (head > bytes) head = bytes;
    CopyShort(y, x, head);
    y += head;
    x += head;
    bytes -= head;
  }
  const int64_t lines = bytes / 64;
  CopyLines<V>(y, x, lines, stream);
  CopyShort(y + lines * 64, x + lines * 64, bytes % 64);
}

template <class V>
void DrainStage(const PermuteBlock& b) {
  const int64_t column = b.rows * b.bytes;
  for (int64_t j = 0; j < b.cols; j += b.run_cols) {
    const int64_t cols = j + b.run_cols <= b.cols ? b.run_cols : b.cols - j;
    Copy<V>(b.y + b.y_offset[j], b.stage + b.stage_offset[j], cols * column,
            /*stream=*/true);
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

// A tile of V::kBytes x V::kBytes. Lane l of a row holds its columns
// [l * 16 / W, (l + 1) * 16 / W); after the transposes in lanes, register k of
// row group g holds in lane l column l * 16 / W + k of that group, so the four
// (L) registers k of the groups are one more transpose away from whole columns.
enum TileKind { kPart, kWhole, kStream };

template <class V, int W, TileKind kind>
JAX_LAYOUT_INLINE void Tile(const char* x, const int64_t* x_offset, char* y,
                            const int64_t* y_offset, int rows, int cols) {
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
      if constexpr (kind != kPart) {
        group[k] = V::Load(x + x_offset[i]);
      } else {
        group[k] =
            i < rows ? V::LoadPart(x + x_offset[i], cols * W) : V::Zero();
      }
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
      if constexpr (kind == kStream) {
        V::Stream(y + y_offset[j], r[k][l]);
      } else if constexpr (kind == kWhole) {
        V::Store(y + y_offset[j], r[k][l]);
      } else {
        if (j < cols) V::StorePart(y + y_offset[j], r[k][l], rows * W);
      }
    }
  }
}

// Fetches the tile of rows [i, i + kTile) into the second-level cache, where
// neither the loads in flight nor rows that are a power of two apart push it
// out. Of two lines, the hardware fetches the other.
template <class V, int W>
JAX_LAYOUT_INLINE void PrefetchTile(const PermuteBlock& b, int64_t i,
                                    int64_t j) {
  constexpr int kTile = V::kBytes / W;
  if (j * W % 128 != 0) return;
  const char* x = b.x;
  if (i > b.rows - kTile) {
    i -= b.rows / kTile * kTile;
    x = b.next_x;
  }
  if (x == nullptr || i > b.rows - kTile) return;
  for (int k = 0; k < kTile; ++k) {
    __builtin_prefetch(x + b.x_offset[i + k] + j * W, 0, 2);
  }
}

template <class V, int W>
void TransposeBlock(const PermuteBlock& b) {
  constexpr int kTile = V::kBytes / W;
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  if (b.rows >= kTile && b.cols >= kTile) {
    // The last tile of a row or column overlaps the one before.
    for (int64_t i = 0; i < b.rows; i += kTile) {
      if (i > b.rows - kTile) i = b.rows - kTile;
      for (int64_t j = 0; j < b.cols; j += kTile) {
        if (j > b.cols - kTile) j = b.cols - kTile;
        PrefetchTile<V, W>(b, i + kTile, j);
        if (b.stream && i % kTile == 0) {
          Tile<V, W, kStream>(b.x + j * W, b.x_offset + i, y + i * W,
                              y_offset + j, kTile, kTile);
        } else {
          Tile<V, W, kWhole>(b.x + j * W, b.x_offset + i, y + i * W,
                             y_offset + j, kTile, kTile);
        }
      }
    }
  } else if constexpr (V::kMasks) {
    for (int64_t i = 0; i < b.rows; i += kTile) {
      const int rows = b.rows - i < kTile ? b.rows - i : kTile;
      for (int64_t j = 0; j < b.cols; j += kTile) {
        const int cols = b.cols - j < kTile ? b.cols - j : kTile;
        Tile<V, W, kPart>(b.x + j * W, b.x_offset + i, y + i * W, y_offset + j,
                          rows, cols);
      }
    }
  } else {
    for (int64_t i = 0; i < b.rows; ++i) {
      const char* x = b.x + b.x_offset[i];
      for (int64_t j = 0; j < b.cols; ++j) {
        MoveElement<W>(y + y_offset[j] + i * W, x + j * W);
      }
    }
  }
  if (b.stage) DrainStage<V>(b);
}

template <class V, int S>
void MoveChunks(const PermuteBlock& b) {
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  for (int64_t i = 0; i < b.rows; ++i) {
    const char* x = b.x + b.x_offset[i];
    for (int64_t j = 0; j < b.cols; ++j) {
      MoveTwice<S>(y + y_offset[j] + i * b.bytes, x + j * b.bytes, b.bytes);
    }
  }
}

template <class V>
void MoveBlock(const PermuteBlock& b) {
  if (b.bytes >= 32) {
    MoveChunks<V, 32>(b);
  } else if (b.bytes >= 16) {
    MoveChunks<V, 16>(b);
  } else if (b.bytes >= 8) {
    MoveChunks<V, 8>(b);
  } else if (b.bytes >= 4) {
    MoveChunks<V, 4>(b);
  } else {
    MoveChunks<V, 2>(b);  // 3 bytes
  }
  if (b.stage) DrainStage<V>(b);
}

template <class V>
void CopyBlock(const PermuteBlock& b) {
  char* y = b.stage ? b.stage : b.y;
  const int64_t* y_offset = b.stage ? b.stage_offset : b.y_offset;
  for (int64_t i = 0; i < b.rows; ++i) {
    for (int64_t j = 0; j < b.cols; ++j) {
      Copy<V>(y + y_offset[j] + i * b.bytes, b.x + b.x_offset[i] + j * b.bytes,
              b.bytes, b.stream);
    }
  }
  if (b.stage) DrainStage<V>(b);
}

// V here is the vector of programs: Shuffle(window, v) puts byte
// window.index[k] of v at k, and zeros where the index is not used.
template <class V>
void RunShuffle(const ShuffleRun& run) {
  const char* x = run.x;
  char* y = run.y;
  for (int64_t n = 0; n < run.repeat; ++n) {
    const ShuffleProgram::Window* w = run.windows;
    for (int64_t o = 0; o < run.num_outputs; ++o) {
      const ShuffleProgram::Output& output = run.outputs[o];
      typename V::Reg v = V::Zero();
      for (int64_t k = 0; k < output.num_windows; ++k, ++w) {
        v = V::Or(v, V::Shuffle(*w, V::LoadPart(x + w->x_offset, w->bytes)));
      }
      char* out = y + output.y_offset;
      if (output.bytes < V::kBytes) {
        V::StorePart(out, v, output.bytes);
      } else if (run.stream && V::kBytes == 64 &&
                 reinterpret_cast<intptr_t>(out) % 64 == 0) {
        V::Stream(out, v);
      } else {
        V::Store(out, v);
      }
    }
    x += run.x_step;
    y += run.y_step;
  }
}

}  // namespace
}  // namespace jax_layout
