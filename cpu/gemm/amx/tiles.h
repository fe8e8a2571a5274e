// SPDX-License-Identifier: Apache-2.0
//
// One thread's share of a bf16 GEMM on AMX tiles: a block of rows x cols of y,
// over all of k.
//
//                  cols
//            +--------------+
//          k |   right      |  packed k_block x cols at a time, into L2
//            +--------------+
//      k
//   +-----+  +--+--+--------+
//   | left|  |  |  | 32 x 32|  four tiles of 16 x 16 f32 at a time
//   +-----+  +--+--+--------+
//     rows
//
// A tile of the left operand has 16 rows of 32 elements along k: rows that are
// contiguous along k are loaded from where they are. A tile of the right one
// has 16 pairs along k by 16 columns, the two of a pair beside each other, and
// is always packed. Where k takes more than one block, the sums wait in `sums`
// scratch as f32.
#ifndef JAX_LAYOUT_CPU_GEMM_AMX_TILES_H_
#define JAX_LAYOUT_CPU_GEMM_AMX_TILES_H_

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {

constexpr int64_t kAmxTile = 16;         // rows, or columns, of a tile
constexpr int64_t kAmxPanel = 32;        // two tiles
constexpr int64_t kAmxStep = 32;         // along k
constexpr int64_t kAmxStepBytes = 2048;  // of a panel
// Between panels, which are packed side by side: their lines would else be in
// the same few sets of L1.
constexpr int64_t kAmxPanelPad = 128;
// Rows of the left operand that are packed at a time.
constexpr int64_t kAmxGroup = 128;
// RunAmxStreamed(): three tiles of rows, whose sums are in six of eight. Steps
// are packed in turn, so that tiles do not load what was only just stored.
constexpr int64_t kAmxStreamedRows = 48;
constexpr int64_t kAmxTurns = 4;

struct AmxOperand {
  const uint16_t* data;  // at the block's first row (column) and k = 0
  int64_t ld;
  bool k_contiguous;
};

struct AmxBlock {
  AmxOperand left, right;
  int64_t rows, cols, k;
  int64_t k_block;       // a multiple of kAmxStep
  bool pack_left;        // into `packed_left`, though it could be read in place
  bool stream;           // y with non-temporal stores, where lines are whole
  bool transposed;       // y's rows run along the block's columns
  int64_t ld;            // of y
  bool result_is_plain;  // bf16, with nothing to do but round
  GemmEpilogue epilogue;
  float* row_sums;  // of the left operand, one per row, or null
  // Scratch, aligned to lines; see GemmAmx() for how much.
  char *packed_right, *packed_left;
  float* accumulators;
};

// Sets the tiles up for this thread, runs, and gives the tiles back.
void RunAmxBlock(const AmxBlock& block);

// The same for at most kAmxStreamedRows rows, and a right operand whose columns
// are contiguous and which is most of what is read: while 32 of its columns at
// a time are packed into L1 and multiplied, its next k_block rows come from
// memory in their order. The sums wait even if k is a single block; no
// row_sums.
void RunAmxStreamed(const AmxBlock& block);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_AMX_TILES_H_
