// SPDX-License-Identifier: Apache-2.0
//
// Runs of elements that belong to one sum, added in registers.
#ifndef JAX_LAYOUT_CPU_MOMENTS_RUNS_H_
#define JAX_LAYOUT_CPU_MOMENTS_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/clones.h"
#include "cpu/elements.h"

namespace jax_layout {

// Elements that lie side by side: rows of l of them.
struct Run {
  int64_t offset, rows;
};

template <typename Element, int kBytes>
struct Vector {
  typedef Element Type __attribute__((vector_size(kBytes)));
};

// Whether a type's elements are summed so: the compiler widens float16 in loops
// alone.
template <typename T>
constexpr bool kSumsRuns = !std::is_same_v<T, F16>;

// Elements that are summed at a time: one, or registers of kBytes, `part` being
// which of them. Numbers of two bytes are every other one's, so that they are
// widened where they lie.
template <typename T>
struct One {
  using Reg = typename T::Sum;
  static JAX_LAYOUT_INLINE void Load(const typename T::Stored* p, Reg* to) {
    *to = T::Load(*p);
  }
};
template <typename T, int kBytes, int part>
struct Many {
  static_assert(kSumsRuns<T>);
  using Reg = typename Vector<typename T::Sum, kBytes>::Type;
  static JAX_LAYOUT_INLINE void Load(const typename T::Stored* p, Reg* to) {
    if constexpr (sizeof(*p) == sizeof(typename T::Sum)) {
      std::memcpy(to, p, kBytes);
    } else {
      typename Vector<uint32_t, kBytes>::Type bits;
      std::memcpy(&bits, p, kBytes);
      bits = part == 0 ? bits << 16 : bits & 0xffff0000u;
      std::memcpy(to, &bits, kBytes);
    }
  }
};

// The sum of a vector's elements, by halves.
template <typename Element, int kBytes>
JAX_LAYOUT_INLINE Element
SumOf(const typename Vector<Element, kBytes>::Type& elements) {
  if constexpr (kBytes == sizeof(Element)) {
    return elements[0];
  } else {
    typename Vector<Element, kBytes / 2>::Type low, high;
    std::memcpy(&low, &elements, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&elements) + sizeof(low),
                sizeof(high));
    return SumOf<Element, kBytes / 2>(low + high);
  }
}

// first and second: sums of what add(Elements, i, &first, &second) adds for the
// elements from i on, those of `count` runs.
template <typename T, int kBytes, typename Add>
JAX_LAYOUT_INLINE void SumRuns(const Run* runs, int64_t count, const Add& add,
                               double* first, double* second) {
  using Sum = typename T::Sum;
  using Reg = typename Vector<Sum, kBytes>::Type;
  constexpr int kRegs = 4;
  constexpr int kParts = sizeof(Sum) / sizeof(typename T::Stored);
  constexpr int64_t kCount = kBytes / sizeof(typename T::Stored);
  constexpr int64_t kStep = kRegs / kParts * kCount;
  // More in float32 would round what follows an outlier too often.
  constexpr int64_t kMost = 32 * kStep;
  Reg a[kRegs] = {}, b[kRegs] = {};
  Sum rest_a = 0, rest_b = 0;
  *first = *second = 0;
  const auto total = [&]() JAX_LAYOUT_LAMBDA {
    const Reg all_a = (a[0] + a[1]) + (a[2] + a[3]);
    const Reg all_b = (b[0] + b[1]) + (b[2] + b[3]);
    *first += SumOf<Sum, kBytes>(all_a);
    *second += SumOf<Sum, kBytes>(all_b);
    for (int r = 0; r < kRegs; ++r) a[r] = b[r] = Reg{};
  };
  const auto add_many = [&](int64_t i, int r) JAX_LAYOUT_LAMBDA {
    add(Many<T, kBytes, 0>(), i, a + r, b + r);
    if constexpr (kParts == 2)
      add(Many<T, kBytes, 1>(), i, a + r + 1, b + r + 1);
  };
  int64_t summed = 0;  // since the last total
  for (int64_t k = 0; k < count; ++k) {
    int64_t i = runs[k].offset;
    const int64_t end = i + runs[k].rows;
    while (i < end) {
      const int64_t stop = std::min(end, i + kMost - summed);
      summed += stop - i;
      for (; i + kStep <= stop; i += kStep) {
#pragma GCC unroll 4
        for (int r = 0; r < kRegs; r += kParts) {
          add_many(i + r / kParts * kCount, r);
        }
      }
      for (; i + kCount <= stop; i += kCount) add_many(i, 0);
      for (; i < stop; ++i) add(One<T>(), i, &rest_a, &rest_b);
      if (summed < kMost) continue;
      total();
      summed = 0;
    }
  }
  total();
  *first += rest_a;
  *second += rest_b;
}

// Adds elements, for SumRuns.
template <typename T>
JAX_LAYOUT_INLINE auto Elements(const typename T::Stored* x) {
  return [x]<class E>(E, int64_t i, typename E::Reg* sum, typename E::Reg*)
             JAX_LAYOUT_LAMBDA {
               typename E::Reg element;
               E::Load(x + i, &element);
               *sum += element;
             };
}

// Adds d = x[i] - center, and d * d.
template <typename T>
JAX_LAYOUT_INLINE auto Deviations(const typename T::Stored* x,
                                  typename T::Sum center) {
  return [x, center]<class E>(E, int64_t i, typename E::Reg* sum,
                              typename E::Reg* square) JAX_LAYOUT_LAMBDA {
    typename E::Reg d;
    E::Load(x + i, &d);
    d -= center;
    *sum += d;
    *square += d * d;
  };
}

// Adds ct[i], and ct[i] * (x[i] - center).
template <typename T>
JAX_LAYOUT_INLINE auto CenteredProducts(const typename T::Stored* ct,
                                        const typename T::Stored* x,
                                        typename T::Sum center) {
  return [ct, x, center]<class E>(E, int64_t i, typename E::Reg* sum,
                                  typename E::Reg* product) JAX_LAYOUT_LAMBDA {
    typename E::Reg c, d;
    E::Load(ct + i, &c);
    E::Load(x + i, &d);
    *sum += c;
    *product += c * (d - center);
  };
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_MOMENTS_RUNS_H_
