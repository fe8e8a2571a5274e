// SPDX-License-Identifier: Apache-2.0
//
// A vector of 32 bytes, for the files of AVX2 and AVX-512, each with its own
// machine code: as kernels.h, in an unnamed namespace.
#include <immintrin.h>

#include "cpu/inline.h"

namespace jax_layout {
namespace {

struct Ymm {
  using Reg = __m256i;
  static constexpr int kBytes = 32;

  static JAX_LAYOUT_INLINE Reg Load(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const Reg*>(p));
  }
  static JAX_LAYOUT_INLINE void Store(char* p, Reg v) {
    _mm256_storeu_si256(reinterpret_cast<Reg*>(p), v);
  }
  static JAX_LAYOUT_INLINE void Stream(char* p, Reg v) {
    _mm256_stream_si256(reinterpret_cast<Reg*>(p), v);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg Low(Reg a, Reg b) {
    if constexpr (W == 1) return _mm256_unpacklo_epi8(a, b);
    if constexpr (W == 2) return _mm256_unpacklo_epi16(a, b);
    if constexpr (W == 4) return _mm256_unpacklo_epi32(a, b);
    if constexpr (W == 8) return _mm256_unpacklo_epi64(a, b);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg High(Reg a, Reg b) {
    if constexpr (W == 1) return _mm256_unpackhi_epi8(a, b);
    if constexpr (W == 2) return _mm256_unpackhi_epi16(a, b);
    if constexpr (W == 4) return _mm256_unpackhi_epi32(a, b);
    if constexpr (W == 8) return _mm256_unpackhi_epi64(a, b);
  }
  static JAX_LAYOUT_INLINE Reg LoadLanes(const char* x, const int64_t* at,
                                         int step) {
    const auto* low = reinterpret_cast<const __m128i*>(x + at[0]);
    const auto* high = reinterpret_cast<const __m128i*>(x + at[step]);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)),
                                   _mm_loadu_si128(high), 1);
  }
  static JAX_LAYOUT_INLINE void TransposeLanes(Reg* r) {
    const Reg low = _mm256_permute2x128_si256(r[0], r[1], 0x20);
    r[1] = _mm256_permute2x128_si256(r[0], r[1], 0x31);
    r[0] = low;
  }
};

}  // namespace
}  // namespace jax_layout
