// SPDX-License-Identifier: Apache-2.0
//
// Packing bf16 operands into AMX tiles, with AVX-512. For tiles.cc;
// all is in an unnamed namespace.
//
// A packed panel holds, for each 32 elements along k, two tiles of 16 lines
// of 64 bytes:
//
//   left    line i: row i, 32 elements along k
//   right   line p: the pair (2p, 2p + 1) along k of each of 16 columns
//
// The right form of a tile is the left form with its 32-bit elements
// transposed. What is outside the operand is zero.
#include <immintrin.h>

#include <cstdint>

#include "cpu/gemm/amx/tiles.h"

namespace jax_layout {
namespace {

JAX_LAYOUT_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// The first n of 32 elements.
JAX_LAYOUT_INLINE __mmask32 First32(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n < 0 ? 0 : n)) - 1;
}

// Transposes a 16 x 16 matrix of 32-bit elements.
JAX_LAYOUT_INLINE void Transpose16(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  // Now r[4 i + j], lane l: column 4 l + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i64x2(r[j], r[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i64x2(r[j], r[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i64x2(r[8 + j], r[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i64x2(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i64x2(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i64x2(b, d, 0x88);
    t[8 + j] = _mm512_shuffle_i64x2(a, c, 0xdd);
    t[12 + j] = _mm512_shuffle_i64x2(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Two lines along the columns to the pairs of columns 0 to 15 and 16 to 31.
JAX_LAYOUT_INLINE void Interleave(__m512i even, __m512i odd, __m512i* low,
                                  __m512i* high) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  even = _mm512_permutexvar_epi64(order, even);
  odd = _mm512_permutexvar_epi64(order, odd);
  *low = _mm512_unpacklo_epi16(even, odd);
  *high = _mm512_unpackhi_epi16(even, odd);
}

// Rows of 32 elements along k: `rows` of at most 16.
JAX_LAYOUT_INLINE void LoadRows(const uint16_t* x, int64_t ld, int64_t rows,
                                int64_t k, __m512i* r) {
  const __mmask32 mask = First32(k);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * ld)
                    : _mm512_setzero_si512();
  }
}

JAX_LAYOUT_INLINE void StoreLines(char* y, const __m512i* r) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(y + 64 * i, r[i]);
}

// x[k, cols], columns contiguous, to right panels `panel_bytes` apart. Pairs
// of rows outside: they are read as they lie, and written to many panels.
void PackRightAcross(const uint16_t* x, int64_t ld, int64_t k, int64_t cols,
                     char* y, int64_t panel_bytes) {
  constexpr int64_t kAhead = 32;  // rows, each perhaps in a page of its own
  const int64_t steps = (k + kAmxStep - 1) / kAmxStep;
  for (int64_t pair = 0; pair < steps * 16; ++pair) {
    const uint16_t* row = x + 2 * pair * ld;
    char* to = y + pair / 16 * kAmxStepBytes + pair % 16 * 64;
    const bool has_even = 2 * pair < k, has_odd = 2 * pair + 1 < k;
    const uint16_t* soon = 2 * pair + kAhead < k ? row + kAhead * ld : row;
    for (int64_t j = 0; j < cols; j += 32, to += panel_bytes) {
      const __mmask32 mask = First32(cols - j);
      _mm_prefetch(reinterpret_cast<const char*>(soon + j), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(soon + ld + j), _MM_HINT_T1);
      const __m512i even =
          _mm512_maskz_loadu_epi16(has_even ? mask : 0, row + j);
      const __m512i odd =
          _mm512_maskz_loadu_epi16(has_odd ? mask : 0, row + ld + j);
      __m512i low, high;
      Interleave(even, odd, &low, &high);
      _mm512_store_si512(to, low);
      _mm512_store_si512(to + 1024, high);
    }
  }
}

// x[cols, k], k contiguous, to right panels.
void PackRightAlong(const uint16_t* x, int64_t ld, int64_t k, int64_t cols,
                    char* y, int64_t panel_bytes) {
  for (int64_t j = 0; j < cols; j += 16) {
    char* to = y + j / 32 * panel_bytes + j % 32 * 64;
    for (int64_t s = 0; s < k; s += kAmxStep, to += kAmxStepBytes) {
      __m512i r[16];
      LoadRows(x + j * ld + s, ld, cols - j, k - s, r);
      Transpose16(r);
      StoreLines(to, r);
    }
    // The panel's second tile is read even if no column is in it.
    if (j % 32 == 0 && j + 16 >= cols) {
      __m512i zero[16];
      LoadRows(x, 0, 0, 0, zero);
      to = y + j / 32 * panel_bytes + 1024;
      for (int64_t s = 0; s < k; s += kAmxStep, to += kAmxStepBytes) {
        StoreLines(to, zero);
      }
    }
  }
}

// x[rows, k], k contiguous, to a left panel of up to 32 rows.
void PackLeftAlong(const uint16_t* x, int64_t ld, int64_t rows, int64_t k,
                   char* y) {
  for (int64_t i = 0; i < 32; ++i) {
    char* to = y + 64 * i;
    for (int64_t s = 0; s < k; s += kAmxStep, to += kAmxStepBytes) {
      _mm512_store_si512(to,
                         _mm512_maskz_loadu_epi16(i < rows ? First32(k - s) : 0,
                                                  x + i * ld + s));
    }
  }
}

// x[k, rows], rows contiguous, to left panels.
void PackLeftAcross(const uint16_t* x, int64_t ld, int64_t rows, int64_t k,
                    char* y, int64_t panel_bytes) {
  for (int64_t s = 0; s < k; s += kAmxStep, y += kAmxStepBytes) {
    char* to = y;
    for (int64_t i = 0; i < rows; i += 32, to += panel_bytes) {
      const __mmask32 mask = First32(rows - i);
      __m512i low[16], high[16];
#pragma GCC unroll 16
      for (int p = 0; p < 16; ++p) {
        const uint16_t* row = x + (s + 2 * p) * ld + i;
        const __m512i even =
            _mm512_maskz_loadu_epi16(s + 2 * p < k ? mask : 0, row);
        const __m512i odd =
            _mm512_maskz_loadu_epi16(s + 2 * p + 1 < k ? mask : 0, row + ld);
        Interleave(even, odd, &low[p], &high[p]);
      }
      Transpose16(low);
      StoreLines(to, low);
      Transpose16(high);
      StoreLines(to + 1024, high);
    }
  }
}

}  // namespace
}  // namespace jax_layout
