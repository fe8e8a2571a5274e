// SPDX-License-Identifier: Apache-2.0
//
// What permute.cc asks of the code compiled for one instruction set. That code
// may run only where the instruction set is known to exist, so nothing here is
// an inline function that a linker could share with the rest.
#ifndef JAX_LAYOUT_CPU_PERMUTE_BLOCK_H_
#define JAX_LAYOUT_CPU_PERMUTE_BLOCK_H_

#include <cstdint>
#include <vector>

namespace jax_layout {

// Bytes of a thread's stage: with the lines of x that fill it, half of a small
// second-level cache.
inline constexpr int64_t kStageBytes = 256 << 10;

// One block: chunk (i, j) goes from x + x_offset[i] + j * bytes to
// y + y_offset[j] + i * bytes, for i < rows and j < cols.
struct PermuteBlock {
  const char* x;
  char* y;
  const int64_t* x_offset;
  const int64_t* y_offset;
  int64_t rows, cols;
  int64_t bytes;  // of a chunk

  // With a stage, the block is built there, column j at stage_offset[j], and
  // leaves in runs of run_cols columns.
  char* stage;  // or null
  const int64_t* stage_offset;
  int64_t run_cols;

  // Non-temporal stores, of the stage if there is one. Else every column is
  // aligned to 64 bytes, or finds the lines in it that are (chunks of 64 bytes
  // or more).
  bool stream;
};

using BlockFunction = void(const PermuteBlock&);

// A fixed permute of bytes as a list of output vectors, each the union of
// shuffled windows of x.
struct ShuffleProgram {
  // Byte k of the output is byte index[k] % 128 of the window if the high bit
  // of index[k] is set, and else another window's.
  struct Window {
    alignas(64) uint8_t index[64];
    int64_t x_offset;
    int64_t bytes;  // to load, up to a vector; nothing beyond is touched
  };
  struct Output {
    int64_t y_offset;
    int64_t bytes;
    int64_t num_windows;
  };
  std::vector<Output> outputs;
  std::vector<Window> windows;  // of the first output, then of the second, ...
  std::vector<int64_t> lines;   // of x: offsets of what the program reads
  bool whole = true;            // all windows and outputs are whole vectors
};

struct ShuffleRun {
  const ShuffleProgram::Output* outputs;
  int64_t num_outputs;
  const ShuffleProgram::Window* windows;
  const int64_t* lines;
  int64_t num_lines;
  bool whole;
  const char* x;
  char* y;
  int64_t repeat, x_step, y_step;
  bool stream;
};

struct PermuteFunctions {
  int64_t vector_bytes;
  int64_t shuffle_bytes;        // of a program's vector; 0: no shuffles
  BlockFunction* transpose[5];  // chunks of 1, 2, 4, 8 and 16 bytes
  BlockFunction* packed[3];     // of 3, 5 to 7 and 9 to 15 bytes; or null
  BlockFunction* move;          // chunks of other sizes below 64 bytes
  BlockFunction* copy;          // chunks of 64 bytes or more
  void (*shuffle)(const ShuffleRun&);
};

extern const PermuteFunctions kPermutePortable;
#ifdef __x86_64__
extern const PermuteFunctions kPermuteAvx2;
extern const PermuteFunctions kPermuteAvx512;
#elif defined(__aarch64__)
extern const PermuteFunctions kPermuteNeon;
#endif

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PERMUTE_BLOCK_H_
