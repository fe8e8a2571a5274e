// SPDX-License-Identifier: Apache-2.0
//
// The kernels of kernels.h, for the source files of one
// instruction set each: all is in an unnamed namespace, so that each keeps its
// own machine code. A vector type V is as in cpu/vectors/epilogue.h, and offers
//
//   kRows              of a product, as many as registers hold
//   Every(step)        a step of so many elements from lane to lane
//   Gather(p, steps)   what lies so, of f32
#ifndef JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_
#define JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/float16.h"
#include "cpu/clones.h"
#include "cpu/conv/winograd/kernels.h"
#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

constexpr int kVectors = 2;    // of a panel
constexpr int kPrefetch = 24;  // rows of b ahead

template <class V, class T>
JAX_LAYOUT_INLINE typename V::Reg LoadEvery(const T* p, int64_t step) {
  if (step == 1) return V::Load(p);
  if constexpr (std::is_same_v<T, float>) return V::Gather(p, V::Every(step));
  T all[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) all[i] = p[i * step];
  return V::Load(all);
}

JAX_LAYOUT_INLINE float Widened(float x) { return x; }
JAX_LAYOUT_INLINE float Widened(BF16 x) { return FloatOfBf16(x.bits); }
JAX_LAYOUT_INLINE float Widened(F16 x) { return FloatOfF16(x.bits); }

template <class V, class T>
void Filters(const WinogradFilters& steps, const void* w, int64_t channels,
             float* u, int64_t plane) {
  using Reg = typename V::Reg;
  auto load = [&](const T* p)
                  JAX_LAYOUT_LAMBDA { return LoadEvery<V>(p, steps.out); };
  const Reg half = V::Set(0.5f);
  for (int64_t c = 0; c < channels; ++c) {
    for (int v = 0; v < kVectors; ++v) {
      const T* from =
          static_cast<const T*>(w) + c * steps.in + v * V::kLanes * steps.out;
      float* to = u + (c * kVectors + v) * V::kLanes;
      Reg t[4][3];
#pragma GCC unroll 3
      for (int j = 0; j < 3; ++j) {
        const Reg a = load(from + j * steps.col);
        const Reg b = load(from + steps.row + j * steps.col);
        const Reg c = load(from + 2 * steps.row + j * steps.col);
        const Reg ends = half * (a + c), middle = half * b;
        t[0][j] = a;
        t[1][j] = ends + middle;
        t[2][j] = ends - middle;
        t[3][j] = c;
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Reg ends = half * (t[i][0] + t[i][2]), middle = half * t[i][1];
        V::Store(to + (4 * i + 0) * plane, t[i][0]);
        V::Store(to + (4 * i + 1) * plane, ends + middle);
        V::Store(to + (4 * i + 2) * plane, ends - middle);
        V::Store(to + (4 * i + 3) * plane, t[i][2]);
      }
    }
  }
}

// The pixels that a tile reads; `zeros` are those of the padding.
template <class T>
struct Pixels {
  JAX_LAYOUT_INLINE Pixels(const WinogradTiles& tiles, const void* x,
                           int64_t tile, const void* zeros) {
    const WinogradImage& in = tiles.in;
    const int64_t row = tile / tiles.cols;
    const int64_t top = row % tiles.rows * 2 - tiles.pad_row;
    const int64_t left = tile % tiles.cols * 2 - tiles.pad_col;
    const T* image = static_cast<const T*>(x) + row / tiles.rows * in.image;
    const T* none = static_cast<const T*>(zeros);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const bool inside = top + i >= 0 && top + i < in.height &&
                            left + j >= 0 && left + j < in.width;
        at[i][j] =
            inside ? image + (top + i) * in.row + (left + j) * in.col : none;
      }
    }
  }

  const T* at[4][4];
};

// The results that a tile writes: fewer than four at the image's ends.
template <class T>
struct Results {
  JAX_LAYOUT_INLINE Results(const WinogradTiles& tiles, void* y, int64_t tile)
      : col(tiles.out.col), row(tiles.out.row) {
    const WinogradImage& out = tiles.out;
    const int64_t line = tile / tiles.cols;
    const int64_t top = line % tiles.rows * 2;
    const int64_t left = tile % tiles.cols * 2;
    at = static_cast<T*>(y) + line / tiles.rows * out.image + top * row +
         left * col;
    below = top + 1 < out.height;
    right = left + 1 < out.width;
  }

  // z[i][j] with bias and relu. Returns the sum of those written, without.
  template <class V, class Reg>
  JAX_LAYOUT_INLINE Reg Store(const Reg (&z)[2][2], int64_t c, const void* bias,
                              bool relu) const {
    const Reg base =
        bias != nullptr ? V::Load(static_cast<const T*>(bias) + c) : V::Zero();
    Reg sum = V::Zero();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        if ((i == 1 && !below) || (j == 1 && !right)) continue;
        sum = sum + z[i][j];
        const Reg sum_and_bias = z[i][j] + base;
        V::Store(at + i * row + j * col + c,
                 relu ? V::Max(V::Zero(), sum_and_bias) : sum_and_bias);
      }
    }
    return sum;
  }

  T* at;
  int64_t col, row;
  bool below, right;
};

template <class V, class T>
void Input(const WinogradTiles& tiles, const void* x, int64_t first,
           int64_t count, int64_t channels, const void* zeros, float* v,
           int64_t plane) {
  using Reg = typename V::Reg;
  for (int64_t t = 0; t < count; ++t) {
    const Pixels<T> pixels(tiles, x, first + t, zeros);
    float* to = v + t * channels;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
      Reg s[4][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Reg d[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) d[i] = V::Load(pixels.at[i][j] + c);
        s[0][j] = d[0] - d[2];
        s[1][j] = d[1] + d[2];
        s[2][j] = d[2] - d[1];
        s[3][j] = d[1] - d[3];
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        V::Store(to + (4 * i + 0) * plane + c, s[i][0] - s[i][2]);
        V::Store(to + (4 * i + 1) * plane + c, s[i][1] + s[i][2]);
        V::Store(to + (4 * i + 2) * plane + c, s[i][2] - s[i][1]);
        V::Store(to + (4 * i + 3) * plane + c, s[i][1] - s[i][3]);
      }
    }
  }
}

template <class V, int kCount>
void Product(const float* a, int64_t a_row, const float* b, int64_t depth,
             float* m, int64_t m_row, const float* next, int64_t next_step) {
  using Reg = typename V::Reg;
  Reg sum[kCount][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = V::Zero();
  }
  // Addresses of three rows take one register, with the step between rows.
  const float* rows[(kCount + 2) / 3];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += 3) rows[i / 3] = a + i * a_row;
  for (int64_t k = 0; k < depth; ++k, b += kVectors * V::kLanes) {
    Reg factor[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      factor[v] = V::Load(b + v * V::kLanes);
      __builtin_prefetch(b + (kPrefetch * kVectors + v) * V::kLanes);
    }
    __builtin_prefetch(next + k * next_step, 0, 2);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const Reg x = V::Set(rows[i / 3][i % 3 * a_row + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = sum[i][v] + x * factor[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      V::Store(m + i * m_row + v * V::kLanes, sum[i][v]);
    }
  }
}

template <class V, class T>
float Output(const WinogradTiles& tiles, const float* m, int64_t m_row,
             int64_t plane, int64_t first, int64_t count, int64_t channels,
             const void* bias, bool relu, void* y) {
  using Reg = typename V::Reg;
  Reg nothing = V::Zero();
  for (int64_t t = 0; t < count; ++t) {
    const Results<T> to(tiles, y, first + t);
    const float* from = m + t * m_row;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
      Reg s[2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Reg d[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          d[i] = V::Load(from + (4 * i + j) * plane + c);
        }
        s[0][j] = d[0] + d[1] + d[2];
        s[1][j] = d[1] - d[2] - d[3];
      }
      Reg z[2][2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        z[i][0] = s[i][0] + s[i][1] + s[i][2];
        z[i][1] = s[i][1] - s[i][2] - s[i][3];
      }
      nothing = nothing + V::Zero() * to.template Store<V>(z, c, bias, relu);
    }
  }
  return V::Sum(nothing);
}

template <class V, class T, class Y>
void Plain(const WinogradTiles& tiles, const void* x, int64_t tile,
           int64_t channels, const void* zeros, const WinogradFilters& steps,
           const void* w, const void* bias, bool relu, void* y) {
  using Reg = typename V::Reg;
  const Pixels<T> pixels(tiles, x, tile, zeros);
  const Results<Y> to(tiles, y, tile);
  for (int v = 0; v < kVectors; ++v) {
    const T* filter = static_cast<const T*>(w) + v * V::kLanes * steps.out;
    Reg z[2][2];
    for (auto& row : z) row[0] = row[1] = V::Zero();
    for (int64_t k = 0; k < channels; ++k) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) {
#pragma GCC unroll 3
        for (int j = 0; j < 3; ++j) {
          const Reg tap = LoadEvery<V>(
              filter + k * steps.in + i * steps.row + j * steps.col, steps.out);
#pragma GCC unroll 4
          for (int at = 0; at < 4; ++at) {
            Reg& sum = z[at / 2][at % 2];
            sum = sum +
                  tap * V::Set(Widened(pixels.at[at / 2 + i][at % 2 + j][k]));
          }
        }
      }
    }
    to.template Store<V>(z, v * V::kLanes, bias, relu);
  }
}

template <class V>
struct Products {
  template <int... i>
  static constexpr auto Make(std::integer_sequence<int, i...>) {
    return std::array{&Product<V, i + 1>...};
  }
  static constexpr auto all = Make(std::make_integer_sequence<int, V::kRows>());
};

template <class V, class T, class Y>
constexpr WinogradSteps kSteps = {Filters<V, T>, Input<V, T>, Output<V, Y>,
                                  Plain<V, T, Y>};

template <class V>
const WinogradSteps* StepsOf(DType type, DType result) {
  const bool wide = result == DType::kF32;
  if (type != result && !wide) return nullptr;
  switch (type) {
    case DType::kF32:
      return &kSteps<V, float, float>;
    case DType::kBF16:
      return wide ? &kSteps<V, BF16, float> : &kSteps<V, BF16, BF16>;
    case DType::kF16:
      return wide ? &kSteps<V, F16, float> : &kSteps<V, F16, F16>;
    default:
      return nullptr;
  }
}

template <class V>
constexpr WinogradKernels KernelsOf() {
  return {kVectors * V::kLanes, V::kRows, StepsOf<V>, Products<V>::all.data()};
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_
