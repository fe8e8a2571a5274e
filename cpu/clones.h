// SPDX-License-Identifier: Apache-2.0
//
// Plain loops that the compiler vectorises, compiled for several levels.
#ifndef JAX_LAYOUT_CPU_CLONES_H_
#define JAX_LAYOUT_CPU_CLONES_H_

#include "cpu/inline.h"
#include "cpu/isa.h"

namespace jax_layout {

// `body`, a JAX_LAYOUT_INLINE function, as one that is compiled for a level.
template <auto body, class Function = decltype(body)>
struct Clones;
template <auto body, class Result, class... Arguments>
struct Clones<body, Result (*)(Arguments...)> {
  static Result Portable(Arguments... arguments) { return body(arguments...); }
#ifdef __x86_64__
  [[gnu::target("avx2,fma,f16c")]] static Result Avx2(Arguments... arguments) {
    return body(arguments...);
  }
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]]
  static Result Avx512(Arguments... arguments) {
    return body(arguments...);
  }
#endif

  template <Isa isa>
  static constexpr auto* For() {
#ifdef __x86_64__
    if constexpr (isa == Isa::kAvx512) return Avx512;
    if constexpr (isa == Isa::kAvx2) return Avx2;
#endif
    if constexpr (isa == Isa::kPortable) return Portable;
  }
};

template <Isa isa, auto body>
inline constexpr auto* kCompiled = Clones<body>::template For<isa>();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CLONES_H_
