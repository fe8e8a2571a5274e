// SPDX-License-Identifier: Apache-2.0
//
// Block products of bf16 on AMX tiles; all between them is vectors of AVX-512.
// Pairs are tiles' operands as they lie.
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/attention/kernels.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma,amx-tile,amx-bf16")
#include "cpu/attention/backward.h"
#include "cpu/attention/pairs.h"
#include "cpu/vectors/amx.h"

namespace jax_layout {
namespace {

// Blocks of queries are whole tiles.
struct TileFloats : Floats {};
template <>
constexpr int64_t kQueries<TileFloats> = 64;

// Pairs that are zero up to whole tiles along k. Rows of left operands behind
// the last are anything: so are their sums, which are not stored.
struct InTiles : Pairs {
  static constexpr int64_t kStep = 32;
  // Rows of queries, an odd number of cache lines, in place of those of kLd.
  static constexpr int64_t kAcrossRow = kQueries<TileFloats> / kDepth + 16;
  static_assert(kKeys * kAcrossRow <= kQueries<TileFloats> * kLd);

  static void PackTransposed(const BF16* from, int64_t ld, int64_t rows,
                             int64_t features, float* to) {
    const int64_t used = features / kDepth, slots = UpTo(features, kStep) / 2;
    for (int64_t i = 0; i < rows; i += kCols<Floats>) {
      float* panel = to + i * slots;
      Pairs::PackTransposed(from + i * ld, ld, Least(kCols<Floats>, rows - i),
                            features, panel);
      std::fill_n(panel + used * kCols<Floats>, (slots - used) * kCols<Floats>,
                  0.f);
    }
  }
  static void CopyRows(const BF16* from, int64_t ld, int64_t rows,
                       int64_t features, float factor, float* to) {
    Pairs::CopyRows(from, ld, rows, features, factor, to);
    const int64_t used = features / kDepth, slots = UpTo(features, kStep) / 2;
    for (int64_t i = 0; i < rows; ++i) {
      std::fill_n(to + i * kLd + used, slots - used, 0.f);
    }
  }
  static void PackRows(const BF16* from, int64_t ld, int64_t rows,
                       int64_t features, float* to, int64_t panel) {
    Pairs::PackRows(from, ld, rows, features, to, panel);
    const int64_t used = UpTo(rows, kDepth) / 2, slots = UpTo(rows, kStep) / 2;
    for (int64_t j = 0; j < features; j += kCols<Floats>, to += panel) {
      std::fill_n(to + used * kCols<Floats>, (slots - used) * kCols<Floats>,
                  0.f);
    }
  }
  // To rows of keys, in which pairs of queries follow each other.
  static const float* NarrowAcross(const float* rows, int64_t count,
                                   int64_t begin, int64_t end, float* to) {
    for (int64_t i = 0; i < count; i += kStep) {
      for (int64_t j = begin; j < end; j += 16) {
        __m512 r[16];
        for (int l = 0; l < 16; ++l) {
          const int64_t first = i + 2 * l;
          const float* at = rows + first * kLd + j;
          r[l] = Floats::Zero();
          if (first >= count) continue;
          const __m512 second =
              first + 1 < count ? Floats::Load(at + kLd) : Floats::Zero();
          r[l] = Join(Narrow(Floats::Load(at)), Narrow(second));
        }
        Floats::Transpose(r);
#pragma GCC unroll 16
        for (int l = 0; l < 16; ++l) {
          Floats::Store(to + (j + l) * kAcrossRow + i / kDepth, r[l]);
        }
      }
    }
    return to;
  }

  // See tiles.h. Sums leave by way of the first-level cache, as tiles can store
  // neither parts of columns nor what is added to.
  template <bool kAcross>
  static void Multiply(int64_t rows, int64_t panel, int64_t columns,
                       const TileArguments& all) {
    constexpr int64_t kRow = kAcross ? kAcrossRow : kLd;
    for (int64_t j = 0; j < columns; j += kCols<Floats>) {
      const bool both = columns - j > 16;
      for (int64_t i = 0; i < rows; i += 32) {
        TileArguments t = all;
        t.a += i * kRow;
        t.b += j / kCols<Floats> * panel;
        t.y += i * t.ld + j;
        if (t.factors != nullptr) t.factors += i;
        const int64_t count = Least(32, rows - i);
        if (count > 16) {
          both ? Block<kRow, 2, 2>(t, count) : Block<kRow, 2, 1>(t, count);
        } else {
          both ? Block<kRow, 1, 2>(t, count) : Block<kRow, 1, 1>(t, count);
        }
      }
    }
  }
  template <int64_t kRow, int kRows, int kVectors>
  static void Block(const TileArguments& t, int64_t rows) {
    using Sums = AmxSums<kRows, kVectors>;
    constexpr int64_t kFloat = sizeof(float);
    alignas(64) float sums[kRows * 512];
    asm volatile("" ::: "memory");  // what was packed is there
    Sums::Zero();
    for (int64_t p = 0; p < t.k; p += kStep / kDepth) {
      Sums::Add(reinterpret_cast<const char*>(t.a + p), kRow * kFloat,
                16 * kRow * kFloat,
                reinterpret_cast<const char*>(t.b + p * kCols<Floats>),
                kCols<Floats> * kFloat, 16 * kFloat);
    }
    Sums::Store(sums);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r / 16 * 512 + r % 16 * 16;
      float* to = t.y + r * t.ld;
      const __m512 factor =
          Floats::Set(t.factors == nullptr ? 1 : t.factors[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m512 sum = Floats::Load(from + v * 256);
        Floats::Store(to + v * 16,
                      t.add ? sum + factor * Floats::Load(to + v * 16)
                            : sum * Floats::Set(t.times));
      }
    }
  }
};

void ForwardTiles(const AttentionTask& task) {
  const AmxTiles tiles;
  ForwardOf<TileFloats, InTiles, BF16>(task);
}

void BackwardTiles(const AttentionGradientTask& task) {
  const AmxTiles tiles;
  BackwardOf<TileFloats, InTiles, BF16>(task);
}

}  // namespace

// Few queries are not for tiles.
const AttentionKernels kAttentionAmx = {kQueries<TileFloats>,
                                        FloatsForward<TileFloats>,
                                        ForwardTiles,
                                        FloatsBackward<TileFloats>,
                                        BackwardTiles,
                                        Join<Floats>,
                                        0,
                                        nullptr,
                                        nullptr,
                                        nullptr,
                                        nullptr};

}  // namespace jax_layout
#endif  // __x86_64__
