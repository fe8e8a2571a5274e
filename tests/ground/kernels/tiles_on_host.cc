// SPDX-License-Identifier: Apache-2.0
//
// What tests/tiles_on_host.h is to do, and what it is to refuse: named by the
// argument.
#include "tests/tiles_on_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
};
// Tiles 0 to 6 are whole; sums of 5 x 7 in 1 by 3 pairs from 2 and 3.
Config Parts() {
  Config config;
  config.rows[1] = config.rows[2] = 5;
  config.row_bytes[1] = config.row_bytes[3] = 28;
  config.row_bytes[2] = 12;
  config.rows[3] = 3;
  return config;
}

float memory[16 * 16] = {};

float FromBF16(uint16_t bits) {
  const uint32_t all = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &all, sizeof(value));
  return value;
}

// 0 if the sums of all shapes are right, and what is denormal is zero.
int Products() {
  uint16_t left[5][6], right[3][14];
  uint32_t bits = 1;
  for (auto* x : {&left[0][0], &right[0][0]}) {
    const int count = x == &left[0][0] ? 30 : 42;
    for (int i = 0; i < count; ++i) {
      bits = bits * 1664525 + 1013904223;
      x[i] = static_cast<uint16_t>(0x3f00 | (bits >> 16 & 0x80ff));
    }
  }
  left[1][2] = 0x0060;  // denormal, and with what follows 0.75
  right[1][12] = 0x7e80;
  for (int k = 0; k < 6; ++k) left[4][k] = k == 0 ? 0x0100 : 0;
  right[0][0] = 0x3c00;  // whose product is denormal
  right[0][2] = 0xbf00;  // or the sum
  float sums[5][7];
  for (auto& row : sums) std::fill(std::begin(row), std::end(row), 2.f);
  sums[4][0] = 0;
  sums[4][1] = 1.5f * 0x1p-126f;
  const Config config = Parts();
  _tile_loadconfig(&config);
  _tile_loadd(1, sums, 28);
  _tile_loadd(2, left, 12);
  _tile_loadd(3, right, 28);
  _tile_dpbf16ps(1, 2, 3);
  float found[5][7];
  _tile_stored(1, found, 28);
  for (int m = 0; m < 5; ++m) {
    for (int n = 0; n < 7; ++n) {
      double want = sums[m][n];
      for (int k = 0; k < 6; ++k) {
        const uint16_t a = left[m][k], b = right[k / 2][2 * n + k % 2];
        if ((a & 0x7f80) != 0 && (b & 0x7f80) != 0) {
          want += double{FromBF16(a)} * FromBF16(b);
        }
      }
      if (std::fabs(want) < 1.2e-38) want = 0;
      const double slack = m < 4 ? 1e-5 * std::fmax(1, std::fabs(want)) : 0;
      if (!(std::fabs(found[m][n] - want) <= slack)) return 1;
    }
  }
  // What is set up is all zero.
  _tile_loadconfig(&config);
  _tile_stored(1, found, 28);
  for (const auto& row : found) {
    for (const float x : row) {
      if (x != 0) return 1;
    }
  }
  Config kept;
  _tile_storeconfig(&kept);
  if (std::memcmp(&kept, &config, sizeof(config)) != 0) return 1;
  _tile_release();
  _tile_storeconfig(&kept);
  return kept.palette;
}

void SetUp() {
  const Config config = Parts();
  _tile_loadconfig(&config);
}

}  // namespace

int main(int, char** arguments) {
  const auto is = [&](const char* name) {
    return std::strcmp(arguments[1], name) == 0;
  };
  if (is("products")) return Products();
  if (is("nothing set up")) _tile_zero(0);
  SetUp();
  if (is("tile not set up")) _tile_loadd(7, memory, 64);
  if (is("rows")) _tile_dpbf16ps(0, 2, 3);
  if (is("columns")) _tile_dpbf16ps(1, 2, 4);
  if (is("depth")) {
    Config config = Parts();
    config.rows[3] = 4;
    _tile_loadconfig(&config);
    _tile_dpbf16ps(1, 2, 3);
  }
  if (is("one tile for two")) _tile_dpbf16ps(4, 5, 5);
  if (is("larger than a tile")) {
    Config config;
    config.rows[0] = 17;
    _tile_loadconfig(&config);
  }
  if (is("given back")) {
    _tile_release();
    _tile_stored(0, memory, 64);
  }
  return 0;
}
