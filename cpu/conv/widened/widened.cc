// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/widened/widened.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "core/arithmetic.h"
#include "core/float16.h"
#include "cpu/clones.h"
#include "cpu/conv/parts.h"
#include "cpu/isa.h"
#include "cpu/pages.h"

namespace jax_layout {
namespace {

template <float (*widened)(uint16_t)>
JAX_LAYOUT_INLINE void WidenAll(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widened(from[i]);
}
template <uint16_t (*rounded)(float)>
JAX_LAYOUT_INLINE void RoundAll(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = rounded(from[i]);
}

struct Conversions {  // of bf16, and of f16
  void (*widen[2])(const uint16_t*, float*, int64_t);
  void (*round[2])(const float*, uint16_t*, int64_t);
};
template <Isa isa>
constexpr Conversions kConversions = {{kCompiled<isa, WidenAll<FloatOfBf16>>,
                                       kCompiled<isa, WidenAll<FloatOfF16>>},
                                      {kCompiled<isa, RoundAll<Bf16OfFloat>>,
                                       kCompiled<isa, RoundAll<F16OfFloat>>}};

const Kernels<const Conversions*> kKernels(
    "widened", {
#ifdef __x86_64__
                   {Isa::kAvx512, &kConversions<Isa::kAvx512>},
                   {Isa::kAvx2, &kConversions<Isa::kAvx2>},
#endif
                   {Isa::kPortable, &kConversions<Isa::kPortable>}});

template <class From, class To>
void Convert(void (*convert)(const From*, To*, int64_t), const void* from,
             void* to, int64_t n, const Executor& executor) {
  constexpr int64_t kPiece = 1 << 15;
  executor.ParallelFor(CeilDiv(n, kPiece), [&](int64_t i) {
    convert(static_cast<const From*>(from) + i * kPiece,
            static_cast<To*>(to) + i * kPiece,
            std::min(kPiece, n - i * kPiece));
  });
}

struct Array {
  void* ConvBuffers::* data;
  int64_t count;
  bool result, wide;  // wide: it is f32 already
  int64_t at = 0;     // in the workspace, in bytes
};

}  // namespace

ConvProblem Widened(const ConvProblem& problem) {
  ConvProblem wide = problem;
  wide.type = wide.result = DType::kF32;
  return wide;
}

void Widen(const ConvProblem& p, ConvKernel wide, ConvKernel* kernel) {
  constexpr int64_t kAlign = 4096;
  const bool f32 = p.result == DType::kF32;
  std::array<Array, 3> arrays = {
      {{&ConvBuffers::x, p.batch * p.in_channels * ConvProduct(p.in),
        p.pass == ConvPass::kInputGrad, false},
       {&ConvBuffers::w,
        p.out_channels * (p.in_channels / p.groups) * ConvProduct(p.kernel),
        p.pass == ConvPass::kWeightGrad, false},
       {&ConvBuffers::y, p.batch * p.out_channels * ConvProduct(p.out),
        p.pass == ConvPass::kForward, false}}};
  int64_t bytes = 0;
  const auto take = [&bytes](int64_t count) {
    const int64_t at = bytes;
    bytes += RoundUp(count * static_cast<int64_t>(sizeof(float)), kAlign);
    return at;
  };
  for (Array& array : arrays) {
    array.wide = array.result && f32;
    if (!array.wide) array.at = take(array.count);
  }
  const int64_t bias_at = p.bias && !f32 ? take(p.out_channels) : 0;
  kernel->implementation = "widened, " + wide.implementation;
  kernel->w_format = wide.w_format;
  kernel->workspace = bytes + wide.workspace;
  const int type = p.type == DType::kF16;
  kernel->run = [p, f32, type, arrays, bytes, bias_at, wide = std::move(wide)](
                    const ConvBuffers& given, const Executor& executor) {
    const Conversions& kernels = *kKernels.Take();
    char* const memory = static_cast<char*>(given.workspace);
    TouchPages(memory, bytes, executor);
    ConvBuffers buffers = given;
    for (const Array& array : arrays) {
      if (array.wide) continue;
      buffers.*array.data = memory + array.at;
      if (array.result) continue;
      Convert(kernels.widen[type], given.*array.data, memory + array.at,
              array.count, executor);
    }
    if (p.bias && !f32) {
      buffers.bias = memory + bias_at;
      Convert(kernels.widen[type], given.bias, memory + bias_at, p.out_channels,
              executor);
    }
    buffers.workspace = memory + bytes;
    buffers.workspace_bytes = given.workspace_bytes - bytes;
    const Status status = wide.run(buffers, executor);
    if (!status.ok()) return status;
    for (const Array& array : arrays) {
      if (array.wide || !array.result) continue;
      Convert(kernels.round[type], memory + array.at, given.*array.data,
              array.count, executor);
    }
    return status;
  };
}

}  // namespace jax_layout
