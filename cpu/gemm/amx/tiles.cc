// SPDX-License-Identifier: Apache-2.0
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/gemm/problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,bmi2,fma,amx-tile,amx-bf16")
#include "cpu/gemm/amx/pack.h"
#include "cpu/gemm/amx/tiles.h"
#include "cpu/vectors/amx.h"
#include "cpu/vectors/avx512.h"

namespace jax_layout {
namespace {

// With the processor's own rounding, which takes denormals for 0 as the tiles
// do.
struct V : Avx512Floats {
  using Avx512Floats::Store;
  static JAX_LAYOUT_INLINE void Store(BF16* p, Reg v, int n) {
    _mm256_mask_storeu_epi16(p, First(n), (__m256i)_mm512_cvtneps_pbh(v));
  }
};

// A product of panels. A panel's second tile is `tile` bytes after its first,
// the next 32 elements along k are `step` bytes further.
struct Product {
  const char* left;
  int64_t left_stride, left_tile, left_step;
  const char* left_tail;  // packed, for the step that is not whole, or null
  const char* right;
  int64_t steps;
  float* sums;  // four tiles, each contiguous
  bool add;     // to what is in `sums`
  // What is needed soon: rows of the next left panel, in step with this one.
  const char* next;
  int64_t next_stride, next_rows;
};

// kRows x kCols tiles.
template <int kRows, int kCols>
void Multiply(const Product& p) {
  using Sums = AmxSums<kRows, kCols>;
  asm volatile("" ::: "memory");  // what was packed is there
  p.add ? Sums::Load(p.sums) : Sums::Zero();
  const char* left = p.left;
  const char* right = p.right;
  const char* next = p.next;
  for (int64_t s = 0; s < p.steps; ++s) {
    for (int64_t i = 0; i < p.next_rows; ++i) {
      _mm_prefetch(next + i * p.next_stride, _MM_HINT_T1);
    }
    Sums::Add(left, p.left_stride, p.left_tile, right, 64, 1024);
    left += p.left_step;
    right += kAmxStepBytes;
    next += 64;
  }
  if (p.left_tail != nullptr) Sums::Add(p.left_tail, 64, 1024, right, 64, 1024);
  Sums::Store(p.sums);
}

void Multiply(const Product& p, int64_t rows, int64_t cols) {
  if (rows > kAmxTile) {
    cols > kAmxTile ? Multiply<2, 2>(p) : Multiply<2, 1>(p);
  } else {
    cols > kAmxTile ? Multiply<1, 2>(p) : Multiply<1, 1>(p);
  }
}

// The 32 x 32 sums of a transposed result to the order of y.
void TransposeSums(float* sums) {
  __m512i r[4][16];
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 16; ++i) {
      r[t][i] = _mm512_load_si512(sums + t * 256 + i * 16);
    }
    Transpose16(r[t]);
  }
  for (int t = 0; t < 4; ++t) {
    const int from = t == 1 ? 2 : t == 2 ? 1 : t;
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(sums + t * 256 + i * 16, r[from][i]);
    }
  }
}

// Rows of a whole panel that need nothing but rounding: one line each.
void StorePlain(const float* sums, int64_t rows, BF16* y, int64_t ld,
                bool stream) {
  for (int64_t i = 0; i < rows; ++i, y += ld) {
    const float* row = sums + i / 16 * 512 + i % 16 * 16;
    const __m512i line =
        (__m512i)_mm512_cvtne2ps_pbh(V::Load(row + 256), V::Load(row));
    if (stream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(y), line);
    } else {
      _mm512_storeu_si512(y, line);
    }
  }
}

// Sums of a panel to y, at row i and column j of the block (of y's own order).
void FinishPanel(const AmxBlock& b, float* sums, int64_t i, int64_t j,
                 int64_t rows, int64_t cols) {
  const GemmEpilogue& e = b.epilogue;
  if (b.result_is_plain && cols == 32) {
    return StorePlain(sums, rows, reinterpret_cast<BF16*>(e.y) + i * b.ld + j,
                      b.ld, b.stream);
  }
  auto finish = [&]<class T, Activation kActivation, Activation kDerivative>() {
    const GemmEpilogue here = e;  // the compiler sees that y is not in it
    auto piece = [&](const float* row, int64_t at, int64_t c, int count) {
      Finish<V, T, kActivation, kDerivative>(here, V::Load(row + c * 16),
                                             at + c, j + c, count);
    };
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = sums + r / 16 * 512 + r % 16 * 16;
      const int64_t at = (i + r) * b.ld + j;
      if (cols == 32) {
        piece(row, at, 0, 16);
        piece(row, at, 16, 16);
        continue;
      }
      for (int64_t c = 0; c < cols; c += 16) {
        piece(row, at, c, static_cast<int>(Least(16, cols - c)));
      }
    }
  };
  if (e.result == DType::kBF16) {
    WithActivation<BF16>(e, finish);
  } else {
    WithActivation<float>(e, finish);
  }
}

// Adds the sums along k of a panel's rows.
void AddRowSums(const char* left, int64_t stride, int64_t tile, int64_t step,
                int64_t steps, int64_t rows, float* sums) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t i = 0; i < rows; ++i) {
    const char* row = left + i / 16 * tile + i % 16 * stride;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t s = 0; s < steps; ++s) {
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row + s * step),
                             ones);
    }
    sums[i] += _mm512_reduce_add_ps(sum);
  }
}

// A block over the elements [k0, k0 + k) along k.
class KBlock {
 public:
  KBlock(const AmxBlock& b, int64_t k0)
      : b_(b),
        k0_(k0),
        k_(Least(b.k_block, b.k - k0)),
        steps_((k_ + kAmxStep - 1) / kAmxStep),
        panel_(steps_ * kAmxStepBytes + kAmxPanelPad),
        first_(k0 == 0),
        last_(k0 + b.k_block >= b.k),
        waits_(b.k > b.k_block) {}

  void Run() {
    const AmxOperand& right = b_.right;
    if (right.k_contiguous) {
      PackRightAlong(right.data + k0_, right.ld, k_, b_.cols, b_.packed_right,
                     panel_);
    } else {
      PackRightAcross(right.data + k0_ * right.ld, right.ld, k_, b_.cols,
                      b_.packed_right, panel_);
    }
    for (int64_t i = 0; i < b_.rows; i += kAmxPanel) {
      const int64_t rows = Least(kAmxPanel, b_.rows - i);
      Product p = Left(i, rows);
      if (b_.row_sums != nullptr) {
        AddRowSums(p.left, p.left_stride, p.left_tile, p.left_step, p.steps,
                   rows, b_.row_sums + i);
        if (p.left_tail != nullptr) {
          AddRowSums(p.left_tail, 64, 1024, 0, 1, rows, b_.row_sums + i);
        }
      }
      RunPanel(p, i, rows);
    }
  }

 private:
  // The left panel of rows i to i + rows, packed if it has to be.
  Product Left(int64_t i, int64_t rows) {
    const AmxOperand& left = b_.left;
    Product p = {};
    p.right = b_.packed_right;
    p.left_tile = 1024;
    p.left_stride = 64;
    p.left_step = kAmxStepBytes;
    p.steps = steps_;
    if (!left.k_contiguous) {
      if (i % kAmxGroup == 0) {
        PackLeftAcross(left.data + k0_ * left.ld + i, left.ld,
                       Least(kAmxGroup, b_.rows - i), k_, b_.packed_left,
                       panel_);
      }
      p.left = b_.packed_left + i % kAmxGroup / kAmxPanel * panel_;
      return p;
    }
    const uint16_t* at = left.data + i * left.ld + k0_;
    const int64_t tail = k_ % kAmxStep;
    if (b_.pack_left || (rows != 16 && rows != 32)) {
      PackLeftAlong(at, left.ld, rows, k_, b_.packed_left);
      p.left = b_.packed_left;
    } else {
      p.left = reinterpret_cast<const char*>(at);
      p.left_stride = 2 * left.ld;
      p.left_tile = 16 * p.left_stride;
      p.left_step = 64;
      if (tail != 0) {
        --p.steps;
        PackLeftAlong(at + k_ - tail, left.ld, rows, tail, b_.packed_left);
        p.left_tail = b_.packed_left;
      }
    }
    // Its successor's rows are shared out among the panels of columns.
    const int64_t after = Least(kAmxPanel, b_.rows - i - rows);
    if (after > 0) {
      const int64_t panels = (b_.cols + kAmxPanel - 1) / kAmxPanel;
      p.next = reinterpret_cast<const char*>(at + rows * left.ld);
      p.next_stride = 2 * left.ld;
      p.next_rows = (after + panels - 1) / panels;
      next_left_ = after;
    } else {
      next_left_ = 0;
    }
    return p;
  }

  void RunPanel(Product p, int64_t i, int64_t rows) {
    alignas(64) float here[1024];
    const int64_t columns = (b_.cols + kAmxPanel - 1) / kAmxPanel;
    const int64_t next_rows = p.next_rows;
    for (int64_t j = 0; j < b_.cols; j += kAmxPanel) {
      const int64_t cols = Least(kAmxPanel, b_.cols - j);
      p.add = !first_;
      p.sums = waits_ ? b_.accumulators +
                            (i / kAmxPanel * columns + j / kAmxPanel) * 1024
                      : here;
      p.next_rows = Least(next_rows, next_left_);
      Multiply(p, rows, cols);
      next_left_ -= p.next_rows;
      p.next += p.next_rows * p.next_stride;
      p.right += panel_;
      if (!last_) continue;
      if (b_.transposed) {
        TransposeSums(p.sums);
        FinishPanel(b_, p.sums, j, i, cols, rows);
      } else {
        FinishPanel(b_, p.sums, i, j, rows, cols);
      }
    }
  }

  const AmxBlock& b_;
  const int64_t k0_, k_, steps_, panel_;
  const bool first_, last_, waits_;
  int64_t next_left_ = 0;
};

// Asks for the lines of a block, in the order of memory, while the one before
// it is multiplied.
class Lines {
 public:
  Lines(const uint16_t* x, int64_t ld, int64_t rows, int64_t cols)
      : row_(x), end_(x + cols), at_(x), ld_(ld), rows_(rows) {}

  void Fetch(int64_t count) {
    for (int64_t i = 0; i < count && rows_ > 0; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
      at_ += 32;
      if (at_ >= end_) {
        --rows_;
        row_ += ld_;
        end_ += ld_;
        at_ = row_;
      }
    }
  }

 private:
  const uint16_t *row_, *end_, *at_;
  int64_t ld_, rows_;
};

// x[32, 32], columns contiguous, to a right panel's step, with the columns in
// the order that InOrder() undoes: half the shuffles of Interleave().
template <bool kWhole>
JAX_LAYOUT_INLINE void PackStep(const uint16_t* x, int64_t ld, int64_t k,
                                int64_t cols, char* y) {
  const __mmask32 mask = First32(cols);
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) {
    const uint16_t* row = x + 2 * p * ld;
    __m512i even, odd;
    if constexpr (kWhole) {
      even = _mm512_loadu_si512(row);
      odd = _mm512_loadu_si512(row + ld);
    } else {
      even = _mm512_maskz_loadu_epi16(2 * p < k ? mask : 0, row);
      odd = _mm512_maskz_loadu_epi16(2 * p + 1 < k ? mask : 0, row + ld);
    }
    _mm512_store_si512(y + 64 * p, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(y + 64 * p + 1024, _mm512_unpackhi_epi16(even, odd));
  }
}

void InOrder(float* sums, int64_t rows) {
  const __m512i low =
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t i = 0; i < rows; ++i) {
    float* row = sums + i / 16 * 512 + i % 16 * 16;
    const __m512 a = V::Load(row), b = V::Load(row + 256);
    V::Store(row, _mm512_permutex2var_ps(a, low, b));
    V::Store(row + 256, _mm512_permutex2var_ps(a, high, b));
  }
}

// 16 kTiles rows by 32 columns, over a block along k. Tiles 2 t and 2 t + 1 are
// the sums of row tile t.
template <int kTiles>
void MultiplyStreamed(const AmxBlock& b, const uint16_t* right, int64_t k,
                      int64_t cols, bool add, float* sums, Lines* next) {
  // Half of the lines that a step packs: asking for all of them is slower.
  constexpr int64_t kLines = 16;
  asm volatile("" ::: "memory");
  if (add) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if constexpr (kTiles > 1) _tile_loadd(2, sums + 512, 64);
    if constexpr (kTiles > 1) _tile_loadd(3, sums + 768, 64);
    if constexpr (kTiles > 2) _tile_loadd(4, sums + 1024, 64);
    if constexpr (kTiles > 2) _tile_loadd(5, sums + 1280, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles > 1) _tile_zero(2);
    if constexpr (kTiles > 1) _tile_zero(3);
    if constexpr (kTiles > 2) _tile_zero(4);
    if constexpr (kTiles > 2) _tile_zero(5);
  }
  const char* left = b.packed_left;
  const int64_t panel = b.k_block / kAmxStep * kAmxStepBytes;
  for (int64_t s = 0; s < k; s += kAmxStep, left += kAmxStepBytes) {
    char* packed = b.packed_right + s / kAmxStep % kAmxTurns * kAmxStepBytes;
    const uint16_t* at = right + s * b.right.ld;
    next->Fetch(kLines);
    if (k - s >= kAmxStep && cols == kAmxPanel) {
      PackStep<true>(at, b.right.ld, kAmxStep, kAmxPanel, packed);
    } else {
      PackStep<false>(at, b.right.ld, k - s, cols, packed);
    }
    asm volatile("" ::: "memory");
    if constexpr (kTiles < 3) {
      _tile_loadd(6, packed, 64);
      _tile_loadd(4, left, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, packed + 1024, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, left + 1024, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    } else {
      _tile_loadd(7, packed, 64);
      _tile_loadd(6, left, 64);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(6, left + 1024, 64);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(6, left + panel, 64);
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, packed + 1024, 64);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(6, left + 1024, 64);
      _tile_dpbf16ps(3, 6, 7);
      _tile_loadd(6, left, 64);
      _tile_dpbf16ps(1, 6, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if constexpr (kTiles > 1) _tile_stored(2, sums + 512, 64);
  if constexpr (kTiles > 1) _tile_stored(3, sums + 768, 64);
  if constexpr (kTiles > 2) _tile_stored(4, sums + 1024, 64);
  if constexpr (kTiles > 2) _tile_stored(5, sums + 1280, 64);
  asm volatile("" ::: "memory");
}

template <int kTiles>
void RunStreamed(const AmxBlock& b) {
  const int64_t panel = b.k_block / kAmxStep * kAmxStepBytes;
  int64_t k0 = 0;
  do {
    const int64_t k = Least(b.k_block, b.k - k0), after = b.k - k0 - k;
    const uint16_t* right = b.right.data + k0 * b.right.ld;
    for (int64_t i = 0; i < b.rows; i += kAmxPanel) {
      char* to = b.packed_left + i / kAmxPanel * panel;
      const int64_t rows = Least(kAmxPanel, b.rows - i);
      if (b.left.k_contiguous) {
        PackLeftAlong(b.left.data + i * b.left.ld + k0, b.left.ld, rows, k, to);
      } else {
        PackLeftAcross(b.left.data + k0 * b.left.ld + i, b.left.ld, rows, k, to,
                       panel);
      }
    }
    Lines next(right + k * b.right.ld, b.right.ld, Least(b.k_block, after),
               b.cols);
    for (int64_t j = 0; j < b.cols; j += kAmxPanel) {
      float* sums = b.accumulators + j / kAmxPanel * kTiles * 512;
      const int64_t cols = Least(kAmxPanel, b.cols - j);
      MultiplyStreamed<kTiles>(b, right + j, k, cols, k0 > 0, sums, &next);
      if (after == 0) {
        InOrder(sums, b.rows);
        FinishPanel(b, sums, 0, j, b.rows, cols);
      }
    }
    k0 += k;
  } while (k0 < b.k);
}

}  // namespace

void RunAmxStreamed(const AmxBlock& block) {
  {
    const AmxTiles tiles;
    if (block.rows <= kAmxTile) {
      RunStreamed<1>(block);
    } else if (block.rows <= 2 * kAmxTile) {
      RunStreamed<2>(block);
    } else {
      RunStreamed<3>(block);
    }
  }
  if (block.stream) _mm_sfence();
}

void RunAmxBlock(const AmxBlock& block) {
  {
    const AmxTiles tiles;
    int64_t k0 = 0;
    do {
      KBlock(block, k0).Run();
      k0 += block.k_block;
    } while (k0 < block.k);
  }
  if (block.stream) _mm_sfence();
}

}  // namespace jax_layout
#endif  // __x86_64__
