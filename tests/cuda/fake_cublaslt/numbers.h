// SPDX-License-Identifier: Apache-2.0
//
// Elements of every dtype as complex doubles, to nearest even.
#ifndef JAX_LAYOUT_TESTS_FAKE_CUBLASLT_NUMBERS_H_
#define JAX_LAYOUT_TESTS_FAKE_CUBLASLT_NUMBERS_H_

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cuda/gemm/cublaslt.h"

namespace numbers {

namespace lt = jax_layout::lt;
using Complex = std::complex<double>;

inline int64_t Bytes(lt::DataType type) {
  switch (type) {
    case lt::kR8I:
    case lt::kR8FE4M3:
    case lt::kR8FE5M2:
      return 1;
    case lt::kR16F:
    case lt::kR16BF:
      return 2;
    case lt::kR64F:
    case lt::kC32F:
      return 8;
    case lt::kC64F:
      return 16;
    default:
      return 4;
  }
}

// x with so many bits after the leading one.
inline double Round(double x, int bits, int min_exponent) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), min_exponent);
  return std::ldexp(std::nearbyint(std::ldexp(x, bits - exponent)),
                    exponent - bits);
}

// A float of `bits` fraction bits and this exponent bias, with the sign at bit
// `sign`. e4m3 has no infinity, but all of these tests stay finite.
struct Format {
  int bits, bias, sign;
};
inline Format FormatOf(lt::DataType type) {
  switch (type) {
    case lt::kR16F:
      return {10, 15, 15};
    case lt::kR16BF:
      return {7, 127, 15};
    case lt::kR8FE4M3:
      return {3, 7, 7};
    default:
      return {2, 15, 7};
  }
}

inline double Decode(uint32_t code, Format f) {
  const int exponent = code >> f.bits & ((1 << (f.sign - f.bits)) - 1);
  const int fraction = code & ((1 << f.bits) - 1);
  const bool special = f.sign - f.bits == 4
                           ? (code & 0x7f) == 0x7f  // e4m3
                           : exponent == (1 << (f.sign - f.bits)) - 1;
  double x = exponent == 0 ? std::ldexp(fraction, 1 - f.bias - f.bits)
                           : std::ldexp((1 << f.bits) + fraction,
                                        exponent - f.bias - f.bits);
  if (special) {
    x = fraction == 0 ? std::numeric_limits<double>::infinity()
                      : std::numeric_limits<double>::quiet_NaN();
  }
  return code >> f.sign & 1 ? -x : x;
}

inline uint32_t Encode(double x, Format f) {
  const uint32_t sign = std::signbit(x) ? 1u << f.sign : 0;
  const uint32_t top = ((1u << (f.sign - f.bits)) - 1) << f.bits;
  if (std::isnan(x)) return sign | top | ((1u << f.bits) - 1);
  x = Round(std::abs(x), f.bits, 1 - f.bias);
  if (x == 0) return sign;
  const int exponent = std::isinf(x) ? 1 << 20 : std::ilogb(x);
  if (exponent < 1 - f.bias) {
    return sign | static_cast<uint32_t>(std::ldexp(x, f.bits + f.bias - 1));
  }
  if (exponent + f.bias >= (1 << (f.sign - f.bits)) - 1) return sign | top;
  const auto fraction =
      static_cast<uint32_t>(std::ldexp(x, f.bits - exponent)) - (1u << f.bits);
  return sign | static_cast<uint32_t>(exponent + f.bias) << f.bits | fraction;
}

template <typename T>
T Read(const void* from, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * int64_t{sizeof(T)},
              sizeof(T));
  return value;
}
template <typename T>
void Write(void* to, int64_t i, T value) {
  std::memcpy(static_cast<char*>(to) + i * int64_t{sizeof(T)}, &value,
              sizeof(T));
}

inline Complex Load(lt::DataType type, const void* from, int64_t i) {
  switch (type) {
    case lt::kR32F:
      return Read<float>(from, i);
    case lt::kR64F:
      return Read<double>(from, i);
    case lt::kR8I:
      return Read<int8_t>(from, i);
    case lt::kR32I:
      return Read<int32_t>(from, i);
    case lt::kC32F:
      return Complex(Read<std::complex<float>>(from, i));
    case lt::kC64F:
      return Read<Complex>(from, i);
    case lt::kR16F:
    case lt::kR16BF:
      return Decode(Read<uint16_t>(from, i), FormatOf(type));
    default:
      return Decode(Read<uint8_t>(from, i), FormatOf(type));
  }
}

inline void Store(lt::DataType type, void* to, int64_t i, Complex x) {
  switch (type) {
    case lt::kR32F:
      return Write(to, i, static_cast<float>(x.real()));
    case lt::kR64F:
      return Write(to, i, x.real());
    case lt::kR8I:
      return Write(to, i, static_cast<int8_t>(x.real()));
    case lt::kR32I:
      return Write(to, i, static_cast<int32_t>(x.real()));
    case lt::kC32F:
      return Write(to, i, std::complex<float>(x));
    case lt::kC64F:
      return Write(to, i, x);
    case lt::kR16F:
    case lt::kR16BF:
      return Write(to, i,
                   static_cast<uint16_t>(Encode(x.real(), FormatOf(type))));
    default:
      return Write(to, i,
                   static_cast<uint8_t>(Encode(x.real(), FormatOf(type))));
  }
}

inline double Gelu(double x) {
  return 0.5 * x *
         (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline double GeluDerivative(double x) {
  const double scale = std::sqrt(2 / M_PI);
  const double t = std::tanh(scale * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) +
         0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x);
}

}  // namespace numbers

#endif  // JAX_LAYOUT_TESTS_FAKE_CUBLASLT_NUMBERS_H_
