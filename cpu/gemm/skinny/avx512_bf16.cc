// SPDX-License-Identifier: Apache-2.0
//
// Few rows times pairs of bf16.
#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/gemm/problem.h"  // before what follows is for one processor

// GCC 12's header takes its own undefined registers for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")
#include "cpu/gemm/skinny/kernels.h"
#include "cpu/vectors/avx512_bf16.h"

namespace jax_layout {
namespace {

// Up to so many rows, joining rows of the matrix costs more than it saves.
constexpr int64_t kFewRows = 4;

struct Avx512Bf16 : Pairs<BF16, 16> {
  using Sum = float;
  using Reg = __m512i;
  using SumReg = __m512;
  static constexpr int kRegisters = 32;

  static JAX_LAYOUT_INLINE Reg Load(const void* p) {
    return _mm512_loadu_si512(p);
  }
  static JAX_LAYOUT_INLINE Reg Load(const void* p, int n) {
    return _mm512_maskz_loadu_epi16(
        static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static JAX_LAYOUT_INLINE __m256i Half(const BF16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static JAX_LAYOUT_INLINE Reg Joined(const BF16* row, const BF16* next) {
    return JoinPairs(Half(row), Half(next));
  }
  static JAX_LAYOUT_INLINE void Keep(uint16_t* p, Reg w) {
    _mm512_storeu_si512(p, w);
  }
  static JAX_LAYOUT_INLINE Reg Spread(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static JAX_LAYOUT_INLINE SumReg MultiplyAdd(SumReg sum, Reg w, Reg x) {
    return MultiplyAddPairs(sum, w, x);
  }
  static JAX_LAYOUT_INLINE SumReg Zero() { return _mm512_setzero_ps(); }
  static JAX_LAYOUT_INLINE SumReg LoadSums(const float* p) {
    return _mm512_loadu_ps(p);
  }
  static JAX_LAYOUT_INLINE void StoreSums(float* p, SumReg v) {
    _mm512_storeu_ps(p, v);
  }
  static JAX_LAYOUT_INLINE void Totals(const SumReg* sums, float* p) {
    Avx512Floats::Store(p, Avx512Floats::SumOfEach(sums));
  }
};

}  // namespace

void SkinnyAvx512Bf16(const SkinnyBlock& block) {
  if (block.operands != DType::kBF16 ||
      (!block.along && block.rows <= kFewRows)) {
    return SkinnyAvx512(block);
  }
  Multiply<Avx512Bf16>(block);
}

}  // namespace jax_layout
#endif  // __x86_64__
