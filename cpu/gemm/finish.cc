// SPDX-License-Identifier: Apache-2.0
//
// Plain loops over short pieces of rows, each simple enough for the compiler to
// vectorise, compiled once per instruction set.
#include "cpu/gemm/finish.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "cpu/clones.h"

namespace jax_layout {
namespace {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// What elements are computed in.
template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<BF16> {
  using Type = float;
};
template <>
struct Wide<F16> {
  using Type = float;
};
template <>
struct Wide<int8_t> {
  using Type = int32_t;
};
template <class T>
using WideOf = typename Wide<T>::Type;

template <class T>
JAX_LAYOUT_INLINE WideOf<T> Widen(T x) {
  return x;
}

template <>
JAX_LAYOUT_INLINE float Widen(BF16 x) {
  return std::bit_cast<float>(uint32_t{x.bits} << 16);
}

// Without f32 denormals, which XLA's threads flush to zero.
template <>
JAX_LAYOUT_INLINE float Widen(F16 x) {
  constexpr uint32_t kSmallest = 113u << 23;  // 2^-14
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude + kSmallest) -
                              std::bit_cast<float>(kSmallest));
  const uint32_t special = magnitude | (255u << 23);  // infinity or NaN
  const uint32_t finite = magnitude < (1u << 23) ? denormal : normal;
  return std::bit_cast<float>(sign |
                              (magnitude < (31u << 23) ? finite : special));
}

template <class T>
JAX_LAYOUT_INLINE T Narrow(WideOf<T> x) {
  return x;
}

template <>
JAX_LAYOUT_INLINE BF16 Narrow<BF16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return {
      static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : nearest)};
}

template <>
JAX_LAYOUT_INLINE F16 Narrow<F16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t u = bits & 0x7fffffffu;
  // Adding 0.5 leaves the denormal's bits at the end of the fraction, rounded.
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(u) + 0.5f) - (126u << 23);
  const uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  const uint32_t finite = u < (113u << 23) ? denormal : normal;
  const uint32_t special = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {static_cast<uint16_t>(sign | (u < 0x477ff000u ? finite : special))};
}

template <class W>
JAX_LAYOUT_INLINE W Add(W a, W b) {
  return a + b;
}
JAX_LAYOUT_INLINE int32_t Add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) +
                              static_cast<uint32_t>(b));
}
template <class W>
JAX_LAYOUT_INLINE W Multiply(W a, W b) {
  return a * b;
}
JAX_LAYOUT_INLINE int32_t Multiply(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) *
                              static_cast<uint32_t>(b));
}
template <class R>
JAX_LAYOUT_INLINE std::complex<R> Multiply(std::complex<R> a,
                                           std::complex<R> b) {
  return {a.real() * b.real() - a.imag() * b.imag(),
          a.real() * b.imag() + a.imag() * b.real()};
}

template <class W>
JAX_LAYOUT_INLINE W Scalar(std::complex<double> x) {
  return static_cast<W>(x.real());
}
template <>
JAX_LAYOUT_INLINE std::complex<float> Scalar(std::complex<double> x) {
  return std::complex<float>(x);
}
template <>
JAX_LAYOUT_INLINE std::complex<double> Scalar(std::complex<double> x) {
  return x;
}

constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
constexpr double kGeluCube = 0.044715;

// 1 / (1 + e^-2u) = (1 + tanh u) / 2, u = scale * (x + cube * x^3).
JAX_LAYOUT_INLINE double GeluSigmoid(double x) {
  const double u = kGeluScale * (x + kGeluCube * x * x * x);
  return 0.5 * (1 + std::tanh(u));
}

// e^t = 2^n e^r with |r| <= ln(2) / 2, for t in [-87, 87]: 2^n is finite.
JAX_LAYOUT_INLINE float Exp(float t) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's last bit is 1
  const float shifted = t * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(power);
}

// Of e^-2u. Beyond Exp's bounds the result is 0 or 1 within f32.
JAX_LAYOUT_INLINE float GeluSigmoid(float x) {
  constexpr float kScale = -2 * kGeluScale;
  const float exponent =
      x * (kScale + static_cast<float>(-2 * kGeluScale * kGeluCube) * (x * x));
  float t = exponent < -87.f ? -87.f : exponent;  // itself where it is NaN
  t = t > 87.f ? 87.f : t;
  const float s = 1.f / (1.f + Exp(t));
  return exponent > 87.f ? 0.f : s;  // also where z is so large that s matters
}

JAX_LAYOUT_INLINE double GeluErf(double z) {
  return 0.5 * z * std::erfc(-z / std::numbers::sqrt2);
}

// As GeluErf of cpu/vectors/epilogue.h, by the same polynomial.
JAX_LAYOUT_INLINE float GeluErf(float z) {
  const float magnitude = z < 0 ? -z : z;
  const float a = magnitude < 12.f ? magnitude : 12.f;
  const float t = 1.f / (1.f + 0.3f * a);
  float p = 0x1.2cfc8ep-5f;
  p = p * t - 0x1.4b1e7ap-3f;
  p = p * t + 0x1.b68b50p-3f;
  p = p * t - 0x1.f30ea2p-5f;
  p = p * t + 0x1.0f3cd8p-3f;
  p = p * t + 0x1.945a94p-4f;
  p = p * t + 0x1.ef684cp-4f;
  p = p * t + 0x1.e9f2c0p-4f;
  return (z < 0 ? 0.f : z) - a * (p * t * Exp(-0.5f * a * a));
}

template <class W>
JAX_LAYOUT_INLINE W GeluDerivative(W z) {
  // Beyond these bounds it is 0 or 1, and the cube may overflow.
  W x = z < W(-20) ? W(-20) : z;
  x = x > W(20) ? W(20) : x;
  const W s = GeluSigmoid(x);
  return s + x * s * (1 - s) *
                 (W(2 * kGeluScale) + W(6 * kGeluScale * kGeluCube) * x * x);
}

constexpr int64_t kPiece = 256;

template <class W>
constexpr bool kReal = std::is_floating_point_v<W>;

template <class T>
JAX_LAYOUT_INLINE void FinishPiece(const GemmProblem& problem, WideOf<T> alpha,
                                   WideOf<T> beta, const WideOf<T>* product,
                                   const T* bias, T* y, T* aux, int64_t count) {
  using W = WideOf<T>;
  W z[kPiece];
  if (product == nullptr) {
    for (int64_t i = 0; i < count; ++i) z[i] = W(0);
  } else if (alpha == W(1)) {
    for (int64_t i = 0; i < count; ++i) z[i] = product[i];
  } else {
    for (int64_t i = 0; i < count; ++i) z[i] = Multiply(alpha, product[i]);
  }
  if (beta != W(0)) {
    for (int64_t i = 0; i < count; ++i) {
      z[i] = Add(z[i], Multiply(beta, Widen(y[i])));
    }
  }
  if (problem.bias) {
    for (int64_t i = 0; i < count; ++i) z[i] = Add(z[i], Widen(bias[i]));
  }
  if (problem.aux) {
    for (int64_t i = 0; i < count; ++i) aux[i] = Narrow<T>(z[i]);
  }
  if constexpr (kReal<W>) {
    if (problem.activation == Activation::kRelu) {
      for (int64_t i = 0; i < count; ++i) z[i] = z[i] < 0 ? 0 : z[i];
    } else if (problem.activation == Activation::kGelu) {
      for (int64_t i = 0; i < count; ++i) z[i] = z[i] * GeluSigmoid(z[i]);
    } else if (problem.activation == Activation::kGeluErf) {
      for (int64_t i = 0; i < count; ++i) z[i] = GeluErf(z[i]);
    }
    if (problem.derivative == Activation::kRelu) {
      for (int64_t i = 0; i < count; ++i) {
        z[i] = Widen(aux[i]) > 0 ? z[i] : W(0);
      }
    } else if (problem.derivative == Activation::kGelu) {
      for (int64_t i = 0; i < count; ++i) {
        z[i] = z[i] * GeluDerivative(Widen(aux[i]));
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) y[i] = Narrow<T>(z[i]);
}

template <class T>
JAX_LAYOUT_INLINE void Finish(const GemmProblem& problem,
                              std::complex<double> alpha,
                              std::complex<double> beta,
                              const GemmBlock& block) {
  using W = WideOf<T>;
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t j = 0; j < block.cols; j += kPiece) {
      const int64_t at = i * block.ld + j;
      const W* product = static_cast<const W*>(block.product);
      FinishPiece<T>(
          problem, Scalar<W>(alpha), Scalar<W>(beta),
          product ? product + i * block.product_ld + j : nullptr,
          problem.bias ? static_cast<const T*>(block.bias) + j : nullptr,
          static_cast<T*>(block.y) + at,
          block.aux ? static_cast<T*>(block.aux) + at : nullptr,
          std::min(kPiece, block.cols - j));
    }
  }
}

JAX_LAYOUT_INLINE void FinishAny(const GemmProblem& problem,
                                 std::complex<double> alpha,
                                 std::complex<double> beta,
                                 const GemmBlock& block) {
  switch (problem.result) {
    case DType::kF32:
      return Finish<float>(problem, alpha, beta, block);
    case DType::kF64:
      return Finish<double>(problem, alpha, beta, block);
    case DType::kBF16:
      return Finish<BF16>(problem, alpha, beta, block);
    case DType::kF16:
      return Finish<F16>(problem, alpha, beta, block);
    case DType::kS32:
      return Finish<int32_t>(problem, alpha, beta, block);
    case DType::kC64:
      return Finish<std::complex<float>>(problem, alpha, beta, block);
    case DType::kC128:
      return Finish<std::complex<double>>(problem, alpha, beta, block);
    default:
      return;
  }
}

template <class T, class Y>
JAX_LAYOUT_INLINE void Sum(const GemmMatrix& matrix, int64_t k, const void* a,
                           int64_t row, int64_t rows, void* sums) {
  using W = WideOf<T>;
  constexpr int64_t kLanes = 16;
  const T* x = static_cast<const T*>(a);
  Y* out = static_cast<Y*>(sums) + row;
  if (!matrix.transposed) {
    for (int64_t i = 0; i < rows; ++i) {
      const T* elements = x + (row + i) * matrix.ld;
      W lanes[kLanes] = {};
      int64_t p = 0;
      // Not for int8: g++ 12 -O3 makes wrong sums of it.
      constexpr bool kInLanes = !std::is_same_v<T, int8_t>;
      for (; kInLanes && p + kLanes <= k; p += kLanes) {
        for (int64_t l = 0; l < kLanes; ++l) {
          lanes[l] = Add(lanes[l], Widen(elements[p + l]));
        }
      }
      W total = W(0);
      for (; p < k; ++p) total = Add(total, Widen(elements[p]));
      for (W lane : lanes) total = Add(total, lane);
      out[i] = Narrow<Y>(total);
    }
    return;
  }
  for (int64_t i = 0; i < rows; i += kPiece) {
    const int64_t count = std::min(kPiece, rows - i);
    W total[kPiece] = {};
    for (int64_t p = 0; p < k; ++p) {
      const T* elements = x + p * matrix.ld + row + i;
      for (int64_t l = 0; l < count; ++l) {
        total[l] = Add(total[l], Widen(elements[l]));
      }
    }
    for (int64_t l = 0; l < count; ++l) out[i + l] = Narrow<Y>(total[l]);
  }
}

JAX_LAYOUT_INLINE void SumAny(const GemmProblem& problem, const void* a,
                              int64_t row, int64_t rows, void* sums) {
  const GemmMatrix& matrix = problem.plan.a;
  const int64_t k = problem.plan.k;
  const bool f32 = problem.result == DType::kF32;
  switch (problem.operands) {
    case DType::kF32:
      return Sum<float, float>(matrix, k, a, row, rows, sums);
    case DType::kF64:
      return Sum<double, double>(matrix, k, a, row, rows, sums);
    case DType::kBF16:
      return f32 ? Sum<BF16, float>(matrix, k, a, row, rows, sums)
                 : Sum<BF16, BF16>(matrix, k, a, row, rows, sums);
    case DType::kF16:
      return f32 ? Sum<F16, float>(matrix, k, a, row, rows, sums)
                 : Sum<F16, F16>(matrix, k, a, row, rows, sums);
    case DType::kS8:
      return Sum<int8_t, int32_t>(matrix, k, a, row, rows, sums);
    case DType::kC64:
      return Sum<std::complex<float>, std::complex<float>>(matrix, k, a, row,
                                                           rows, sums);
    case DType::kC128:
      return Sum<std::complex<double>, std::complex<double>>(matrix, k, a, row,
                                                             rows, sums);
    default:
      return;
  }
}

template <class T>
JAX_LAYOUT_INLINE void WidenRows(const void* x, int64_t ld, int64_t rows,
                                 int64_t cols, float* y) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = static_cast<const T*>(x) + i * ld;
    for (int64_t j = 0; j < cols; ++j) y[i * cols + j] = Widen(row[j]);
  }
}

JAX_LAYOUT_INLINE void WidenAny(DType type, const void* x, int64_t ld,
                                int64_t rows, int64_t cols, float* y) {
  if (type == DType::kBF16) WidenRows<BF16>(x, ld, rows, cols, y);
  if (type == DType::kF16) WidenRows<F16>(x, ld, rows, cols, y);
}

#ifdef __x86_64__
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]]
void WidenAvx512(DType type, const void* x, int64_t ld, int64_t rows,
                 int64_t cols, float* y) {
  if (type != DType::kF16) return WidenAny(type, x, ld, rows, cols, y);
  for (int64_t i = 0; i < rows; ++i) {
    const F16* row = static_cast<const F16*>(x) + i * ld;
    for (int64_t j = 0; j < cols; j += 16) {
      const __mmask16 some = cols - j < 16 ? (1 << (cols - j)) - 1 : 0xffff;
      _mm512_mask_storeu_ps(
          y + i * cols + j, some,
          _mm512_maskz_cvtph_ps(some, _mm256_maskz_loadu_epi16(some, row + j)));
    }
  }
}
#endif

struct FinishFunctions {
  void (*finish)(const GemmProblem&, std::complex<double>, std::complex<double>,
                 const GemmBlock&);
  void (*sum)(const GemmProblem&, const void*, int64_t, int64_t, void*);
  void (*widen)(DType, const void*, int64_t, int64_t, int64_t, float*);
};
template <Isa isa>
constexpr FinishFunctions kFunctions = {kCompiled<isa, FinishAny>,
                                        kCompiled<isa, SumAny>,
                                        kCompiled<isa, WidenAny>};
#ifdef __x86_64__
template <>
constexpr FinishFunctions kFunctions<Isa::kAvx512> = {
    kCompiled<Isa::kAvx512, FinishAny>, kCompiled<Isa::kAvx512, SumAny>,
    WidenAvx512};
#endif

const Kernels<const FinishFunctions*> kKernels(
    "epilogue", {
#ifdef __x86_64__
                    {Isa::kAvx512, &kFunctions<Isa::kAvx512>},
                    {Isa::kAvx2, &kFunctions<Isa::kAvx2>},
#endif
                    {Isa::kPortable, &kFunctions<Isa::kPortable>}});

}  // namespace

void FinishGemm(const GemmProblem& problem, std::complex<double> alpha,
                std::complex<double> beta, const GemmBlock& block) {
  kKernels.Take()->finish(problem, alpha, beta, block);
}

void SumGemmRows(const GemmProblem& problem, const void* a, int64_t row,
                 int64_t rows, void* sums) {
  kKernels.Take()->sum(problem, a, row, rows, sums);
}

void WidenToF32(DType type, const void* x, int64_t ld, int64_t rows,
                int64_t cols, float* y) {
  kKernels.Take()->widen(type, x, ld, rows, cols, y);
}

}  // namespace jax_layout
