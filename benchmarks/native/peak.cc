// SPDX-License-Identifier: Apache-2.0
//
// Multiplies and adds in registers alone: the ceiling of what is arithmetic.
#include <immintrin.h>

#include <cstdint>

#include "benchmarks/native/thread_pool.h"

namespace jax_layout {
namespace {

// As many sums as a tile of a product has: latencies are hidden.
constexpr int kSums = 12;

// A function of so many steps of kSums multiply-adds; what they sum up to, so
// that they have to be made. A macro, as what is inlined has one target.
#define JAX_LAYOUT_PEAK(name, isa, Reg, one, multiply_add)                     \
  __attribute__((target(isa))) float name(int64_t steps) {                     \
    const Reg x = one;                                                         \
    Reg sum[kSums] = {};                                                       \
    for (int64_t i = 0; i < steps; ++i) {                                      \
      _Pragma("GCC unroll 12") for (Reg& each : sum) {                         \
        each = multiply_add;                                                   \
        asm volatile("" : "+v"(each));                                         \
      }                                                                        \
    }                                                                          \
    float total = 0;                                                           \
    _Pragma("GCC unroll 12") for (const Reg& each : sum) { total += each[0]; } \
    return total;                                                              \
  }

JAX_LAYOUT_PEAK(Avx2, "avx2,fma", __m256, _mm256_set1_ps(1e-3f),
                _mm256_fmadd_ps(x, x, each))
JAX_LAYOUT_PEAK(Avx512, "avx512f", __m512, _mm512_set1_ps(1e-3f),
                _mm512_fmadd_ps(x, x, each))
JAX_LAYOUT_PEAK(Avx512Bf16, "avx512f,avx512bf16", __m512, _mm512_set1_ps(1e-3f),
                _mm512_dpbf16_ps(each, (__m512bh)x, (__m512bh)x))

struct Kind {
  float (*run)(int64_t);
  double operations;  // of a step
};
// By the index in benchmarks/peers/peak_peer.py.
constexpr Kind kKinds[] = {{Avx2, kSums * 8 * 2},
                           {Avx512, kSums * 16 * 2},
                           {Avx512Bf16, kSums * 16 * 4}};

}  // namespace

// Multiplications and additions, `operations` of them in all.
extern "C" void jax_layout_peak(int kind, double operations, int threads) {
  const Kind& chosen = kKinds[kind];
  const auto steps =
      static_cast<int64_t>(operations / chosen.operations / threads) + 1;
  ThreadPool::OfSize(threads).ParallelFor(threads, [&](int64_t) {
    volatile float total = chosen.run(steps);
    static_cast<void>(total);
  });
}

}  // namespace jax_layout
