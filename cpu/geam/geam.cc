// SPDX-License-Identifier: Apache-2.0
//
// Blocks of y: those of an operand that is transposed are transposed in
// registers into the first-level cache, as permutes do it, and added from
// there. Every array is read or written once.
#include "cpu/geam/geam.h"

#include <algorithm>
#include <cstring>

#include "cpu/clones.h"
#include "cpu/pages.h"
#include "cpu/permute/permute.h"

// The loops below are compiled for what memory needs; more is not faster.

namespace jax_layout {
namespace {

constexpr int64_t kRows = 64;       // of a block
constexpr int64_t kRowBytes = 512;  // of a block
constexpr int64_t kBlockBytes = kRows * kRowBytes;

// One row of a block: y = alpha * a + beta * b.
template <typename T>
JAX_LAYOUT_INLINE void AddReal(const void* left, const void* right, void* to,
                               int64_t n, double left_scale,
                               double right_scale) {
  const auto* a = static_cast<const T*>(left);
  const auto* b = static_cast<const T*>(right);
  auto* y = static_cast<T*>(to);
  const T alpha = static_cast<T>(left_scale);
  const T beta = static_cast<T>(right_scale);
  for (int64_t i = 0; i < n; ++i) y[i] = alpha * a[i] + beta * b[i];
}

JAX_LAYOUT_INLINE void AddBf16(const void* left, const void* right, void* to,
                               int64_t n, float alpha, float beta) {
  const auto* a = static_cast<const uint16_t*>(left);
  const auto* b = static_cast<const uint16_t*>(right);
  auto* y = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < n; ++i) {
    const float z =
        alpha * __builtin_bit_cast(float, static_cast<uint32_t>(a[i]) << 16) +
        beta * __builtin_bit_cast(float, static_cast<uint32_t>(b[i]) << 16);
    const uint32_t bits = __builtin_bit_cast(uint32_t, z);
    // To the nearest, ties to even; a NaN stays one.
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    y[i] = static_cast<uint16_t>(z != z ? 0x7fc0 : rounded);
  }
}

template <typename T>
JAX_LAYOUT_INLINE void AddComplex(const void* left, const void* right, void* to,
                                  int64_t n, std::complex<double> alpha,
                                  std::complex<double> beta) {
  const auto* a = static_cast<const T*>(left);
  const auto* b = static_cast<const T*>(right);
  auto* y = static_cast<T*>(to);
  const T ar = static_cast<T>(alpha.real()), ai = static_cast<T>(alpha.imag());
  const T br = static_cast<T>(beta.real()), bi = static_cast<T>(beta.imag());
  for (int64_t i = 0; i < 2 * n; i += 2) {
    const T re = ar * a[i] - ai * a[i + 1] + (br * b[i] - bi * b[i + 1]);
    const T im = ar * a[i + 1] + ai * a[i] + (br * b[i + 1] + bi * b[i]);
    y[i] = re;
    y[i + 1] = im;
  }
}

JAX_LAYOUT_INLINE void AddRow(const GeamProblem& p, const char* a,
                              const char* b, char* y, int64_t n) {
  const double alpha = p.alpha.real(), beta = p.beta.real();
  switch (p.type) {
    case DType::kF32:
      return AddReal<float>(a, b, y, n, alpha, beta);
    case DType::kF64:
      return AddReal<double>(a, b, y, n, alpha, beta);
    case DType::kBF16:
      return AddBf16(a, b, y, n, static_cast<float>(alpha),
                     static_cast<float>(beta));
    case DType::kC64:
      return AddComplex<float>(a, b, y, n, p.alpha, p.beta);
    default:
      return AddComplex<double>(a, b, y, n, p.alpha, p.beta);
  }
}

const Kernels<decltype(&AddRow)> kKernels(
    "geam", {
#ifdef __x86_64__
                {Isa::kAvx2, kCompiled<Isa::kAvx2, AddRow>},
#endif
                {Isa::kPortable, kCompiled<Isa::kPortable, AddRow>}});

// Where the rows of a block of an operand are: the first, and the distance.
struct Rows {
  const char* first;
  int64_t pitch;
};

// Transposes the block of y at (i, j) of an operand that is stored as (n, m).
Rows Transpose(const GeamProblem& p, BlockFunction* transpose, const char* x,
               int64_t i, int64_t j, int64_t rows, int64_t cols, char* stage) {
  const int64_t bytes = ItemSize(p.type);
  int64_t x_offset[kRowBytes];  // at least one byte per chunk
  int64_t y_offset[kRows];
  for (int64_t k = 0; k < cols; ++k) x_offset[k] = k * p.m * bytes;
  for (int64_t k = 0; k < rows; ++k) y_offset[k] = k * kRowBytes;
  PermuteBlock block = {};
  block.x = x + (j * p.m + i) * bytes;
  block.y = stage;
  block.x_offset = x_offset;
  block.y_offset = y_offset;
  block.rows = cols;
  block.cols = rows;
  block.bytes = bytes;
  transpose(block);
  return {stage, kRowBytes};
}

}  // namespace

bool GeamSupported(DType type) {
  return type == DType::kF32 || type == DType::kF64 || type == DType::kBF16 ||
         type == DType::kC64 || type == DType::kC128;
}

Status Geam(const GeamProblem& problem, const void* a, const void* b, void* y,
            const Executor& executor) {
  const GeamProblem& p = problem;
  const int64_t bytes = ItemSize(p.type);
  int log2 = 0;
  while (1 << log2 < bytes) ++log2;
  const auto add_row = kKernels.Take();
  BlockFunction* transpose = FunctionsOf().transpose[log2];
  TouchPages(static_cast<char*>(y), p.batch * p.m * p.n * bytes, executor);
  const int64_t cols = kRowBytes / bytes;
  const int64_t bands = (p.m + kRows - 1) / kRows;
  executor.ParallelFor(p.batch * bands, [&](int64_t task) {
    alignas(64) char stage[2][kBlockBytes];
    const int64_t matrix = task / bands * p.m * p.n * bytes;
    const int64_t i = task % bands * kRows;
    const int64_t rows = std::min(kRows, p.m - i);
    for (int64_t j = 0; j < p.n; j += cols) {
      const int64_t width = std::min(cols, p.n - j);
      const auto take = [&](const void* from, bool transposed, char* to) {
        const char* x = static_cast<const char*>(from) + matrix;
        return transposed ? Transpose(p, transpose, x, i, j, rows, width, to)
                          : Rows{x + (i * p.n + j) * bytes, p.n * bytes};
      };
      const Rows left = take(a, p.transpose_a, stage[0]);
      const Rows right = take(b, p.transpose_b, stage[1]);
      char* out = static_cast<char*>(y) + matrix + (i * p.n + j) * bytes;
      for (int64_t r = 0; r < rows; ++r) {
        add_row(p, left.first + r * left.pitch, right.first + r * right.pitch,
                out + r * p.n * bytes, width);
      }
    }
  });
  return Status::Ok();
}

}  // namespace jax_layout
