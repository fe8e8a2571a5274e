// SPDX-License-Identifier: Apache-2.0
//
// What happens to a finished product on its way to y: alpha, beta, bias,
// activation or derivative, aux. Written once over a vector type V
// (avx512.h, avx2.h, neon.h) and included by one source file per instruction
// set; all is in an unnamed namespace, so that each file keeps its own machine
// code. A vector type V offers
//
//   Reg, kLanes            with + - * of the compiler, contracted to FMAs
//   kRegisters             of the processor
//   kTileRows, kTileVectors  of sums that leave it registers to multiply with
//   kPrefetch              steps along k that panels are asked for ahead, or 0
//   kMasks                 whether parts of vectors are loaded at no cost
//   Load(p, n), Store      n <= kLanes elements, as f32; all without n
//   Max, Min               the second where either is NaN
//   WherePositive(x, z)    z where x > 0, else 0
//   Round, TimesTwoTo      to the nearest integer; x * 2^n for such n
//   Reciprocal             to f32 accuracy
//   Sum, Largest           of the lanes
//   Transpose              kLanes vectors, as the rows of a matrix
//   SumOfEach              of kLanes vectors, each in its lane
#ifndef JAX_LAYOUT_CPU_VECTORS_EPILOGUE_H_
#define JAX_LAYOUT_CPU_VECTORS_EPILOGUE_H_

#include <cstdint>

#include "core/activation.h"
#include "core/dtype.h"
#include "cpu/inline.h"

namespace jax_layout {

// Where, and what; pointers are to the first element of the block.
struct GemmEpilogue {
  float alpha = 1, beta = 0;
  DType result = DType::kF32;
  Activation activation = Activation::kNone;
  Activation derivative = Activation::kNone;
  bool write_aux = false;
  const char* bias = nullptr;  // or none
  char* y = nullptr;
  char* aux = nullptr;  // written or read, or none
};

namespace {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// e^x to 2 ulp for x in [-110, 87]: 2^n e^r with |r| <= log(2) / 2, of which
// the polynomial is within 2e-9 (Remez); log(2) is two floats.
template <class V>
JAX_LAYOUT_INLINE typename V::Reg Exp(typename V::Reg x) {
  using Reg = typename V::Reg;
  const Reg n = V::Round(x * V::Set(0x1.715476p+0f));
  const Reg r = x - n * V::Set(0x1.62e430p-1f) + n * V::Set(0x1.05c610p-29f);
  Reg p = V::Set(0x1.6ab982p-10f);
  p = p * r + V::Set(0x1.126d0cp-7f);
  p = p * r + V::Set(0x1.55589ap-5f);
  p = p * r + V::Set(0x1.55540ap-3f);
  p = p * r + V::Set(0x1.fffffap-2f);
  p = p * r + V::Set(1.f);
  p = p * r + V::Set(1.f);
  return V::TimesTwoTo(p, n);
}

constexpr float kGeluScale = 0.7978845608f;  // sqrt(2 / pi)
constexpr float kGeluCube = 0.044715f;

// 1 / (1 + e^-2u), which is (1 + tanh u) / 2, for u of the gelu of x. Bounded
// so that nothing overflows, or is a denormal, which would take the processor
// a hundred cycles.
template <class V>
JAX_LAYOUT_INLINE typename V::Reg GeluSigmoid(typename V::Reg x) {
  using Reg = typename V::Reg;
  const Reg slope =
      x * x * V::Set(2 * kGeluScale * kGeluCube) + V::Set(2 * kGeluScale);
  const Reg t =
      V::Max(V::Set(-87.f), V::Min(V::Set(87.f), V::Zero() - x * slope));
  return V::Reciprocal(V::Set(1.f) + Exp<V>(t));
}

// Below -20 it is 0 in f32.
template <class V>
JAX_LAYOUT_INLINE typename V::Reg Gelu(typename V::Reg z) {
  const typename V::Reg x = V::Max(V::Set(-20.f), z);
  return x * GeluSigmoid<V>(x);
}

// The normal distribution's tail beyond a in [0, 12]: e^(-a^2 / 2), times a
// function that is within 9e-8 of t times a polynomial of it, t = 1 / (1 + 0.3
// a) (least squares of the relative error, weighted until it is even).
template <class V>
JAX_LAYOUT_INLINE typename V::Reg NormalTail(typename V::Reg a) {
  using Reg = typename V::Reg;
  const Reg t = V::Reciprocal(V::Set(1.f) + V::Set(0.3f) * a);
  Reg p = V::Set(0x1.2cfc8ep-5f);
  p = p * t + V::Set(-0x1.4b1e7ap-3f);
  p = p * t + V::Set(0x1.b68b50p-3f);
  p = p * t + V::Set(-0x1.f30ea2p-5f);
  p = p * t + V::Set(0x1.0f3cd8p-3f);
  p = p * t + V::Set(0x1.945a94p-4f);
  p = p * t + V::Set(0x1.ef684cp-4f);
  p = p * t + V::Set(0x1.e9f2c0p-4f);
  return p * t * Exp<V>(V::Set(-0.5f) * a * a);
}

// z times the share of the distribution below it, which is max(z, 0) - |z|
// times its tail beyond |z|. Beyond 12 that is 0 in f32.
template <class V>
JAX_LAYOUT_INLINE typename V::Reg GeluErf(typename V::Reg z) {
  const typename V::Reg a = V::Min(V::Set(12.f), V::Max(z, V::Zero() - z));
  return V::Max(V::Zero(), z) - a * NormalTail<V>(a);
}

template <class V>
JAX_LAYOUT_INLINE typename V::Reg GeluDerivative(typename V::Reg z) {
  using Reg = typename V::Reg;
  // Beyond these bounds it is 0 or 1, and the cube may overflow.
  const Reg x = V::Max(V::Set(-20.f), V::Min(V::Set(20.f), z));
  const Reg s = GeluSigmoid<V>(x);
  const Reg slope =
      x * x * V::Set(6 * kGeluScale * kGeluCube) + V::Set(2 * kGeluScale);
  return s + x * s * (V::Set(1.f) - s) * slope;
}

// `count` <= V::kLanes elements at `at` of y, in column `column` of the block.
template <class V, class T, Activation kActivation, Activation kDerivative>
JAX_LAYOUT_INLINE void Finish(const GemmEpilogue& e, typename V::Reg z,
                              int64_t at, int64_t column, int count) {
  T* y = reinterpret_cast<T*>(e.y) + at;
  T* aux = reinterpret_cast<T*>(e.aux) + at;
  z = z * V::Set(e.alpha);
  if (e.beta != 0) z = z + V::Set(e.beta) * V::Load(y, count);
  if (e.bias != nullptr) {
    z = z + V::Load(reinterpret_cast<const T*>(e.bias) + column, count);
  }
  if (e.write_aux) V::Store(aux, z, count);
  if constexpr (kActivation == Activation::kRelu) z = V::Max(V::Zero(), z);
  if constexpr (kActivation == Activation::kGelu) z = Gelu<V>(z);
  if constexpr (kActivation == Activation::kGeluErf) z = GeluErf<V>(z);
  if constexpr (kDerivative == Activation::kRelu) {
    z = V::WherePositive(V::Load(aux, count), z);
  }
  if constexpr (kDerivative == Activation::kGelu) {
    z = z * GeluDerivative<V>(V::Load(aux, count));
  }
  V::Store(y, z, count);
}

// Calls body.template operator()<T, activation, derivative>() for what `e`
// says, so that a loop over a block holds no decisions.
template <class T, class Body>
JAX_LAYOUT_INLINE void WithActivation(const GemmEpilogue& e, const Body& body) {
  constexpr Activation kNone = Activation::kNone;
  if (e.activation == Activation::kRelu) {
    body.template operator()<T, Activation::kRelu, kNone>();
  } else if (e.activation == Activation::kGelu) {
    body.template operator()<T, Activation::kGelu, kNone>();
  } else if (e.activation == Activation::kGeluErf) {
    body.template operator()<T, Activation::kGeluErf, kNone>();
  } else if (e.derivative == Activation::kRelu) {
    body.template operator()<T, kNone, Activation::kRelu>();
  } else if (e.derivative == Activation::kGelu) {
    body.template operator()<T, kNone, Activation::kGelu>();
  } else {
    body.template operator()<T, kNone, kNone>();
  }
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_VECTORS_EPILOGUE_H_
