// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 with VBMI: Ice Lake, Zen 4 and later.
#ifdef __x86_64__
#include <immintrin.h>

#include <vector>

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,bmi2")
#include "cpu/permute/kernels.h"
#include "cpu/permute/ymm.h"

namespace jax_layout {
namespace {

struct MaskedYmm : Ymm {
  static constexpr bool kMasks = true;

  static JAX_LAYOUT_INLINE Reg Zero() { return _mm256_setzero_si256(); }
  static JAX_LAYOUT_INLINE __mmask32 First(int64_t bytes) {
    return _bzhi_u32(~0u, static_cast<unsigned>(bytes));
  }
  static JAX_LAYOUT_INLINE Reg LoadPart(const char* p, int64_t bytes) {
    return _mm256_maskz_loadu_epi8(First(bytes), p);
  }
  static JAX_LAYOUT_INLINE void StorePart(char* p, Reg v, int64_t bytes) {
    _mm256_mask_storeu_epi8(p, First(bytes), v);
  }
};

struct Avx512 {
  using Reg = __m512i;
  using Half = MaskedYmm;
  static constexpr int kBytes = 64;
  static constexpr bool kMasks = true;

  static JAX_LAYOUT_INLINE Reg Zero() { return _mm512_setzero_si512(); }
  static JAX_LAYOUT_INLINE Reg Or(Reg a, Reg b) {
    return _mm512_or_si512(a, b);
  }
  static JAX_LAYOUT_INLINE Reg Load(const char* p) {
    return _mm512_loadu_si512(p);
  }
  static JAX_LAYOUT_INLINE void Store(char* p, Reg v) {
    _mm512_storeu_si512(p, v);
  }
  static JAX_LAYOUT_INLINE void Stream(char* p, Reg v) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v);
  }
  static JAX_LAYOUT_INLINE __mmask64 First(int64_t bytes) {
    return _bzhi_u64(~uint64_t{0}, static_cast<unsigned>(bytes));
  }
  static JAX_LAYOUT_INLINE Reg LoadPart(const char* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8(First(bytes), p);
  }
  static JAX_LAYOUT_INLINE void StorePart(char* p, Reg v, int64_t bytes) {
    _mm512_mask_storeu_epi8(p, First(bytes), v);
  }
  static JAX_LAYOUT_INLINE void CopyPart(char* y, const char* x,
                                         int64_t bytes) {
    StorePart(y, LoadPart(x, bytes), bytes);
  }
  // Bytes of v into those of `to` whose index has the high bit set.
  static JAX_LAYOUT_INLINE Reg Shuffle(Reg to, const uint8_t* index, Reg v) {
    const Reg k = _mm512_load_si512(index);
    return _mm512_mask_permutexvar_epi8(to, _mm512_movepi8_mask(k), k, v);
  }
  static JAX_LAYOUT_INLINE Reg Permute(Reg index, Reg v) {
    return _mm512_permutexvar_epi8(index, v);
  }

  template <int W>
  static JAX_LAYOUT_INLINE Reg Low(Reg a, Reg b) {
    if constexpr (W == 1) return _mm512_unpacklo_epi8(a, b);
    if constexpr (W == 2) return _mm512_unpacklo_epi16(a, b);
    if constexpr (W == 4) return _mm512_unpacklo_epi32(a, b);
    if constexpr (W == 8) return _mm512_unpacklo_epi64(a, b);
  }
  template <int W>
  static JAX_LAYOUT_INLINE Reg High(Reg a, Reg b) {
    if constexpr (W == 1) return _mm512_unpackhi_epi8(a, b);
    if constexpr (W == 2) return _mm512_unpackhi_epi16(a, b);
    if constexpr (W == 4) return _mm512_unpackhi_epi32(a, b);
    if constexpr (W == 8) return _mm512_unpackhi_epi64(a, b);
  }
  static JAX_LAYOUT_INLINE Reg LoadLanes(const char* x, const int64_t* at,
                                         int step) {
    auto lane = [&](int l) JAX_LAYOUT_LAMBDA {
      return _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(x + at[l * step]));
    };
    Reg v = _mm512_castsi128_si512(lane(0));
    v = _mm512_inserti64x2(v, lane(1), 1);
    v = _mm512_inserti64x2(v, lane(2), 2);
    return _mm512_inserti64x2(v, lane(3), 3);
  }
  static JAX_LAYOUT_INLINE void TransposeLanes(Reg* r) {
    const Reg a = _mm512_shuffle_i64x2(r[0], r[1], 0x88);  // 0 2 of each
    const Reg b = _mm512_shuffle_i64x2(r[0], r[1], 0xdd);  // 1 3
    const Reg c = _mm512_shuffle_i64x2(r[2], r[3], 0x88);
    const Reg d = _mm512_shuffle_i64x2(r[2], r[3], 0xdd);
    r[0] = _mm512_shuffle_i64x2(a, c, 0x88);
    r[1] = _mm512_shuffle_i64x2(b, d, 0x88);
    r[2] = _mm512_shuffle_i64x2(a, c, 0xdd);
    r[3] = _mm512_shuffle_i64x2(b, d, 0xdd);
  }
};

}  // namespace

const PermuteFunctions kPermuteAvx512 = {
    64,
    64,
    {TransposeBlock<Avx512, 1>, TransposeBlock<Avx512, 2>,
     TransposeBlock<Avx512, 4>, TransposeBlock<Avx512, 8>,
     TransposeBlock<Avx512, 16>},
    {PackedBlock<Avx512, 4>, PackedBlock<Avx512, 8>, PackedBlock<Avx512, 16>},
    MoveBlock<Avx512>,
    CopyBlock<Avx512>,
    RunShuffle<Avx512>,
};

}  // namespace jax_layout
#endif  // __x86_64__
