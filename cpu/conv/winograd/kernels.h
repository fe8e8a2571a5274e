// SPDX-License-Identifier: Apache-2.0
//
// The steps of a Winograd convolution, see winograd.h, over a
// vector type V (cpu/vectors). With tiles of 2 x 2 results, of
// which each reads 4 x 4 of the image,
//
//   y = A^T [ (G w G^T) * (B^T x B) ] A
//
//         1  0 -1  0         1   0   0
//   B^T = 0  1  1  0    G = .5  .5  .5    A^T = 1  1  1  0
//         0 -1  1  0        .5 -.5  .5          0  1 -1 -1
//         0  1  0 -1         0   0   1
//
// and the products, summed over channels, are 16 matrix products, one for each
// of 4 x 4 positions.
#ifndef JAX_LAYOUT_CPU_CONV_WINOGRAD_KERNELS_H_
#define JAX_LAYOUT_CPU_CONV_WINOGRAD_KERNELS_H_

#include <cstdint>

#include "core/dtype.h"

namespace jax_layout {

// An image with contiguous channels.
struct WinogradImage {
  int64_t height, width;
  int64_t image, row, col;  // steps, in elements
};

// Tiles of a convolution, in the order of images, rows and columns.
struct WinogradTiles {
  WinogradImage in, out;
  int64_t pad_row, pad_col;  // before the image
  int64_t rows, cols;        // of tiles in an image
};

// Where the taps of a filter lie, in elements.
struct WinogradFilters {
  int64_t out, in, row, col;  // steps
};

// The steps that read and write arrays, of one dtype of x and w and one of y.
// At [i * 4 + j] of a transformed tile or filter, both f32: `plane` elements
// apart.
struct WinogradSteps {
  // Filters of `panel` output channels for `channels` of input: w[channel, i,
  // j] to u, [channels, panel] in each plane.
  void (*filters)(const WinogradFilters& steps, const void* w, int64_t channels,
                  float* u, int64_t plane);

  // Tiles [first, first + count) of x to v, [count, channels] in each plane.
  // `zeros` are what the padding reads, as many as channels.
  void (*input)(const WinogradTiles& tiles, const void* x, int64_t first,
                int64_t count, int64_t channels, const void* zeros, float* v,
                int64_t plane);

  // m, [count, m_row] in each plane, to tiles of y, in which `channels` are
  // written. Returns 0 if the sums, before bias and relu, are finite, else NaN.
  float (*output)(const WinogradTiles& tiles, const float* m, int64_t m_row,
                  int64_t plane, int64_t first, int64_t count, int64_t channels,
                  const void* bias, bool relu, void* y);

  // A tile of y, [panel], from what `input` and `filters` read, by plain sums.
  void (*plain)(const WinogradTiles& tiles, const void* x, int64_t tile,
                int64_t channels, const void* zeros,
                const WinogradFilters& steps, const void* w, const void* bias,
                bool relu, void* y);
};

struct WinogradKernels {
  int64_t panel;  // output channels that a product makes at a time
  int64_t most_rows;

  // Null for other types than f32, and bf16 and f16 to themselves or to f32.
  const WinogradSteps* (*steps)(DType type, DType result);

  // m = a b: a is [rows, depth] with its rows a_row apart, b [depth, panel],
  // and the rows of m are m_row apart. Meanwhile, depth pieces of next_step
  // elements from `next` on are brought into L2. [rows - 1]
  void (*const* product)(const float* a, int64_t a_row, const float* b,
                         int64_t depth, float* m, int64_t m_row,
                         const float* next, int64_t next_step);
};

extern const WinogradKernels kWinogradAvx2;
extern const WinogradKernels kWinogradAvx512;
extern const WinogradKernels kWinogradNeon;

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WINOGRAD_KERNELS_H_
