// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_TESTS_TILES_AT_REST_H_
#define JAX_LAYOUT_TESTS_TILES_AT_REST_H_

#ifdef __x86_64__
#include <immintrin.h>

// Whether the calling thread has no tiles configured; only with AMX.
extern "C" __attribute__((target("amx-tile"))) int TilesAtRest() {
  alignas(64) char config[64];
  _tile_storeconfig(config);
  for (char byte : config) {
    if (byte != 0) return 0;
  }
  return 1;
}

#endif  // __x86_64__
#endif  // JAX_LAYOUT_TESTS_TILES_AT_REST_H_
