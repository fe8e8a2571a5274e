// SPDX-License-Identifier: Apache-2.0
//
// Division by a constant known to the host: a multiply, an add and a shift in
// place of some twenty instructions (Granlund and Montgomery, 1994).
#ifndef JAX_LAYOUT_CUDA_FAST_DIVISION_CUH_
#define JAX_LAYOUT_CUDA_FAST_DIVISION_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace jax_layout {

__host__ __device__ inline uint32_t MultiplyHigh(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

__host__ __device__ inline uint64_t MultiplyHigh(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// With N bits in UInt, s = ceil(log2 d) and m = floor(2^N (2^s - d) / d) + 1,
//   n / d = (MultiplyHigh(m, n) + n) >> s   for every n < 2^N.
// The sum must not carry out of N bits, hence n < 2^(N-1): whoever plans a
// kernel proves that, or takes the wider UInt.
template <typename UInt>
struct FastDivider {
  static_assert(std::is_same_v<UInt, uint32_t> ||
                std::is_same_v<UInt, uint64_t>);
  UInt divisor = 1;
  UInt multiplier = 1;
  uint32_t shift = 0;

  FastDivider() = default;
  explicit FastDivider(UInt d) : divisor(d) {
    constexpr int kBits = 8 * sizeof(UInt);
    while ((UInt{1} << shift) < d) ++shift;
    const auto gap = static_cast<unsigned __int128>((UInt{1} << shift) - d);
    multiplier = static_cast<UInt>((gap << kBits) / d + 1);
  }

  __host__ __device__ UInt Quotient(UInt n) const {
    return (MultiplyHigh(multiplier, n) + n) >> shift;
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_FAST_DIVISION_CUH_
