// SPDX-License-Identifier: Apache-2.0
//
// AMX tiles in software: compiled with -include of this, kernels for AMX run
// where AVX-512 is, for tests. What a processor would refuse aborts, as does a
// use of tiles that nobody set up.
#ifndef JAX_LAYOUT_TESTS_TILES_ON_HOST_H_
#define JAX_LAYOUT_TESTS_TILES_ON_HOST_H_
#ifdef __x86_64__

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// cpu/isa.cc: such a build has the tiles' level.
#define JAX_LAYOUT_TILES_ON_HOST

namespace tiles_on_host {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

// As LDTILECFG reads it; palette 0 where nothing is set up.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct alignas(64) Tile {
  uint8_t rows[kRows][kRowBytes];
};
struct State {
  Config config;
  Tile tiles[kTiles];
};
inline constinit thread_local State state = {};

inline void Need(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "tiles_on_host: %s\n", what);
  std::abort();
}

inline void LoadConfig(const void* from) {
  Config config;
  std::memcpy(&config, from, sizeof(config));
  Need(config.palette <= 1, "no such palette");
  Need(config.start_row == 0, "nothing was interrupted");
  for (const uint8_t byte : config.reserved) Need(byte == 0, "reserved");
  for (int i = 0; i < 16; ++i) {
    const int bytes = config.row_bytes[i], rows = config.rows[i];
    Need(i < kTiles || (bytes == 0 && rows == 0), "no such tile");
    Need(bytes <= kRowBytes && rows <= kRows, "larger than a tile");
    Need((bytes == 0) == (rows == 0), "rows or columns alone");
  }
  state = {};
  if (config.palette != 0) state.config = config;
}

inline void StoreConfig(void* to) {
  std::memcpy(to, &state.config, sizeof(state.config));
}

inline void Release() { state = {}; }

inline Tile& Used(int i) {
  Need(state.config.palette != 0, "tiles are not set up");
  Need(state.config.rows[i] != 0, "this tile is not set up");
  return state.tiles[i];
}

inline void Zero(int i) { Used(i) = {}; }

// Rows are copied as any others are, so that sanitizers see where they lie.
inline void Load(int i, const void* base, int64_t stride) {
  Tile& tile = Used(i);
  tile = {};
  for (int r = 0; r < state.config.rows[i]; ++r) {
    std::memcpy(tile.rows[r], static_cast<const char*>(base) + r * stride,
                state.config.row_bytes[i]);
  }
}

inline void Store(int i, void* base, int64_t stride) {
  const Tile& tile = Used(i);
  for (int r = 0; r < state.config.rows[i]; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, tile.rows[r],
                state.config.row_bytes[i]);
  }
}

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
// The sums of `rows` rows: even and odd elements along k apart, then both
// added, and to what is there. Optimised even where nothing else is.
__attribute__((noinline, optimize("O2"), target("avx512f"),
               no_sanitize("address", "undefined"))) inline void
AddProducts(Tile* to, const Tile* left, const Tile* right, int rows, int pairs,
            __mmask16 columns) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512 right_even[16], right_odd[16];
  for (int k = 0; k < pairs; ++k) {
    const __m512i both = _mm512_load_si512(right->rows[k]);
    right_even[k] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    right_odd[k] = _mm512_castsi512_ps(_mm512_and_si512(both, odd));
  }
  for (int m = 0; m < rows; ++m) {
    const __m512i both = _mm512_load_si512(left->rows[m]);
    alignas(64) float left_even[16], left_odd[16];
    _mm512_store_si512(left_even, _mm512_slli_epi32(both, 16));
    _mm512_store_si512(left_odd, _mm512_and_si512(both, odd));
    __m512 even = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (int k = 0; k < pairs; ++k) {
      even = _mm512_fmadd_ps(_mm512_set1_ps(left_even[k]), right_even[k], even);
      sum = _mm512_fmadd_ps(_mm512_set1_ps(left_odd[k]), right_odd[k], sum);
    }
    sum = _mm512_add_ps(_mm512_load_ps(to->rows[m]), _mm512_add_ps(even, sum));
    _mm512_store_ps(to->rows[m], _mm512_maskz_mov_ps(columns, sum));
  }
}

#pragma GCC diagnostic pop

inline void Multiply(int to, int left, int right) {
  Tile &sums = Used(to), &a = Used(left), &b = Used(right);
  const Config& c = state.config;
  Need(to != left && to != right && left != right, "one tile for two");
  Need(c.rows[to] == c.rows[left], "rows of sums and left operand");
  Need(c.row_bytes[to] == c.row_bytes[right], "columns of sums and right one");
  Need(c.row_bytes[left] == 4 * c.rows[right], "k of both operands");
  Need(c.row_bytes[to] % 4 == 0, "parts of elements");
  // To the nearest even; denormals are zero, read and written.
  constexpr unsigned kMode = 0x9fc0;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMode);
  asm volatile("" ::: "memory");
  AddProducts(&sums, &a, &b, c.rows[to], c.rows[right],
              static_cast<__mmask16>((1u << c.row_bytes[to] / 4) - 1));
  asm volatile("" ::: "memory");
  _mm_setcsr(before);
}

}  // namespace tiles_on_host

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) tiles_on_host::LoadConfig(from)
#define _tile_storeconfig(to) tiles_on_host::StoreConfig(to)
#define _tile_release() tiles_on_host::Release()
#define _tile_zero(i) tiles_on_host::Zero(i)
#define _tile_loadd(i, base, stride) tiles_on_host::Load(i, base, stride)
#define _tile_stream_loadd(i, base, stride) tiles_on_host::Load(i, base, stride)
#define _tile_stored(i, base, stride) tiles_on_host::Store(i, base, stride)
#define _tile_dpbf16ps(to, left, right) tiles_on_host::Multiply(to, left, right)

#endif  // __x86_64__
#endif  // JAX_LAYOUT_TESTS_TILES_ON_HOST_H_
