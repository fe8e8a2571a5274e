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
#include <type_traits>

#include "cpu/attention/kernels.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma,amx-tile,amx-bf16")
#include "cpu/attention/backward.h"
#include "cpu/attention/few.h"
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

  // See tiles.h. Sums of whole tiles lie where tiles take and leave them;
  // others go by way of the first-level cache, and those that have a factor.
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
  // What is added to, by factors, most of which are 1.
  template <int kRows, int kVectors>
  static void Scale(const TileArguments& t) {
    for (int64_t i = 0; i < kRows; i += 16) {
      unsigned rows = _mm512_cmp_ps_mask(Floats::Load(t.factors + i),
                                         Floats::Set(1), _CMP_NEQ_UQ);
      for (; rows != 0; rows &= rows - 1) {
        const int64_t r = i + __builtin_ctz(rows);
        const __m512 factor = Floats::Set(t.factors[r]);
        float* to = t.y + r * t.ld;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          Floats::Store(to + v * 16, factor * Floats::Load(to + v * 16));
        }
      }
    }
  }
  template <int64_t kRow, int kRows, int kVectors>
  static void Block(const TileArguments& t, int64_t rows) {
    using Sums = AmxSums<kRows, kVectors>;
    constexpr int64_t kFloat = sizeof(float);
    const bool whole = rows == 16 * kRows && (t.add || t.times == 1);
    if (whole && t.add) {
      if (t.factors != nullptr) Scale<16 * kRows, kVectors>(t);
      asm volatile("" ::: "memory");
      Sums::LoadRows(t.y, t.ld);
    } else {
      Sums::Zero();
    }
    asm volatile("" ::: "memory");  // what was packed is there
    for (int64_t p = 0; p < t.k; p += kStep / kDepth) {
      Sums::Add(reinterpret_cast<const char*>(t.a + p), kRow * kFloat,
                16 * kRow * kFloat,
                reinterpret_cast<const char*>(t.b + p * kCols<Floats>),
                kCols<Floats> * kFloat, 16 * kFloat);
    }
    if (whole) return Sums::StoreRows(t.y, t.ld);
    alignas(64) float sums[kRows * 512];
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

// Few queries: keys are left operands where they lie, queries columns; values
// become right operands by pairs of rows, unpacked. What is shorter than a
// tile, or lies in blocks, is copied first.
struct FewTiles : FewOfPairs {
  static constexpr bool kAtOnce = true;
  static_assert(kFewQueries <= 16, "columns of a tile");

  // To a column: of 16 pairs of features each, a tile.
  static void Copy(const BF16* from, int64_t features, float, float* q,
                   int64_t r, int64_t) {
    for (int64_t p = 0; p < features / 2; ++p) {
      std::memcpy(q + p * 16 + r, from + 2 * p, sizeof(float));
    }
  }

  template <class R>
  static void Scores(int64_t queries, const float* q, const BF16* k,
                     const R& rows, int64_t count, int64_t features,
                     float factor, AheadOfRows<BF16, R>* ahead, int64_t lines,
                     float* scores) {
    alignas(64) BF16 copied[2][16 * kMostFeatures];
    using Sums = AmxSums<1, 2>;
    alignas(64) float sums[2 * 256];
    const int64_t asked = lines * 16 * 32 / features;
    for (int64_t j = 0; j < count; j += 32) {
      const Rows<BF16> first = Keys(k, rows, j, count, features, copied[0]);
      const Rows<BF16> second =
          Keys(k, rows, j + 16, count, features, copied[1]);
      asm volatile("" ::: "memory");
      Sums::Zero();
      for (int64_t h = 0; h < features; h += 32) {
        _tile_loadd(4, q + h * 8, 64);
        _tile_loadd(5, first.first + h, first.ld * 2);
        _tile_dpbf16ps(0, 5, 4);
        ahead->Ask(asked);
        if (second.first == nullptr) continue;
        _tile_loadd(6, second.first + h, second.ld * 2);
        _tile_dpbf16ps(1, 6, 4);
        ahead->Ask(asked);
      }
      Sums::Store(sums);
      for (int64_t i = 0; i < 32 && j + i < count; i += 16) {
        __m512 r[16];
#pragma GCC unroll 16
        for (int l = 0; l < 16; ++l) {
          r[l] = Floats::Load(sums + i * 16 + l * 16);
        }
        Floats::Transpose(r);
        for (int64_t l = 0; l < queries; ++l) {
          Floats::Store(scores + l * kStripLd + j + i,
                        Floats::Set(factor) * r[l]);
        }
      }
    }
  }
  // 16 keys from `first` on, none if there are none.
  template <class R>
  static Rows<BF16> Keys(const BF16* k, const R& rows, int64_t first,
                         int64_t count, int64_t features, BF16* copied) {
    if (first >= count) return {nullptr, 0};
    if constexpr (std::is_same_v<R, EveryRow>) {
      if (first + 16 <= count) return {k + rows.At(first), rows.ld};
    }
    for (int64_t i = 0; i < 16; ++i) {
      std::memcpy(copied + i * features,
                  k + rows.At(Least(first + i, count - 1)),
                  features * sizeof(BF16));
    }
    return {copied, features};
  }

  template <class R>
  static void Values(int64_t queries, const float* powers, const BF16* v,
                     const R& rows, int64_t count, int64_t features,
                     const float* factors, AheadOfRows<BF16, R>* ahead,
                     int64_t lines, float* sums, int64_t wide) {
    const int64_t asked = lines * 2 * 32 / features;  // of two rows' block
    int64_t h = 0;
    for (; h + 64 <= features; h += 64) {
      Sum<2>(queries, powers, v + h, rows, count, factors, ahead, asked,
             sums + h, wide);
    }
    if (h < features) {
      Sum<1>(queries, powers, v + h, rows, count, factors, ahead, asked,
             sums + h, wide);
    }
  }
  // Of kBlocks of 32 features.
  template <int kBlocks, class R>
  static void Sum(int64_t queries, const float* powers, const BF16* v,
                  const R& rows, int64_t count, const float* factors,
                  AheadOfRows<BF16, R>* ahead, int64_t asked, float* sums,
                  int64_t wide) {
    using Sums = AmxSums<kBlocks, 2>;  // of blocks, below each other
    alignas(64) float pairs[2 * kBlocks * 256];
    Sums::Zero();
    for (int64_t j = 0; j < count; j += 32) {
      for (int64_t i = 0; i < 32; i += 2) {
        const BF16* one = v + rows.At(Least(j + i, count - 1));
        const BF16* other = v + rows.At(Least(j + i + 1, count - 1));
        float* to = pairs + i * 8;
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) {
          const __m512i above = _mm512_loadu_si512(one + b * 32);
          const __m512i below = _mm512_loadu_si512(other + b * 32);
          _mm512_store_si512(to + b * 512, _mm512_unpacklo_epi16(above, below));
          _mm512_store_si512(to + b * 512 + 256,
                             _mm512_unpackhi_epi16(above, below));
          ahead->Ask(asked);
        }
      }
      asm volatile("" ::: "memory");
      _tile_loadd(4, powers + j / 2, kStripLd * 4);
      _tile_loadd(5, pairs, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, pairs + 256, 64);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (kBlocks == 2) {
        _tile_loadd(7, pairs + 512, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, pairs + 768, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      asm volatile("" ::: "memory");  // before the next are written
    }
    Sums::Store(pairs);
    for (int64_t r = 0; r < queries; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kBlocks; ++i) {
        float* to = sums + r * wide + i * 16;
        Floats::Store(to, Floats::Load(to) * Floats::Set(factors[r]) +
                              Floats::Load(pairs + i * 256 + r * 16));
      }
    }
  }
};

void FewInTiles(const AttentionFewTask& task) {
  const AmxTiles tiles;
  FewOf<Floats, FewTiles>(task);
}

void ForwardTiles(const AttentionTask& task) {
  const AmxTiles tiles;
  ForwardOf<TileFloats, InTiles, BF16>(task);
}

void BackwardTiles(const AttentionGradientTask& task) {
  const AmxTiles tiles;
  BackwardOf<TileFloats, InTiles, BF16>(task);
}

}  // namespace

const AttentionKernels kAttentionAmx = {
    kQueries<TileFloats>, FloatsForward<TileFloats>,
    ForwardTiles,         FloatsBackward<TileFloats>,
    BackwardTiles,        Join<Floats>,
    FloatsFew<Floats>,    FloatsOfPart<Floats>,
    FewInTiles,           FinishFew<Floats>};

}  // namespace jax_layout
#endif  // __x86_64__
