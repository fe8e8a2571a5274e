// SPDX-License-Identifier: Apache-2.0
//
// 16-bit floating point as bits, on both sides of the bus: without the headers
// of either, and in a form that compilers vectorise.
#ifndef JAX_LAYOUT_CORE_FLOAT16_H_
#define JAX_LAYOUT_CORE_FLOAT16_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define JAX_LAYOUT_HOST_DEVICE __host__ __device__
#else
#define JAX_LAYOUT_HOST_DEVICE
#endif

namespace jax_layout {

JAX_LAYOUT_HOST_DEVICE inline float FloatOfBits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}

JAX_LAYOUT_HOST_DEVICE inline uint32_t BitsOfFloat(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof(f));
  return bits;
}

JAX_LAYOUT_HOST_DEVICE inline float FloatOfBf16(uint16_t h) {
  return FloatOfBits(static_cast<uint32_t>(h) << 16);
}

// To the nearest, ties to even; a NaN stays one.
JAX_LAYOUT_HOST_DEVICE inline uint16_t Bf16OfFloat(float f) {
  const uint32_t bits = BitsOfFloat(f);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(f != f ? 0x7fc0 : rounded);
}

// Exponent and mantissa move by 13 bits, and the exponent's bias by 112.
// Threads that take subnormal float32 for zero, as XLA's do, get subnormal
// halves too.
JAX_LAYOUT_HOST_DEVICE inline float FloatOfF16(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude | 0x7f800000;
  const uint32_t subnormal =
      BitsOfFloat(FloatOfBits(magnitude + (113u << 23)) - 0x1p-14f);
  uint32_t bits = magnitude < 0x00800000 ? subnormal : normal;
  bits = magnitude >= 0x0f800000 ? special : bits;
  return FloatOfBits(bits | static_cast<uint32_t>(h & 0x8000) << 16);
}

// To the nearest, ties to even; a NaN stays one.
JAX_LAYOUT_HOST_DEVICE inline uint16_t F16OfFloat(float f) {
  const uint32_t bits = BitsOfFloat(f);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Added to a half, a subnormal number is rounded where its last bit is.
  const uint32_t subnormal =
      BitsOfFloat(FloatOfBits(magnitude) + 0.5f) - 0x3f000000;
  uint32_t h = magnitude < 0x38800000 ? subnormal : normal;
  h = magnitude >= 0x47800000 ? 0x7c00 : h;
  h = magnitude > 0x7f800000 ? 0x7e00 : h;
  return static_cast<uint16_t>(h | (bits >> 16 & 0x8000));
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CORE_FLOAT16_H_
