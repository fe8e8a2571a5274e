// SPDX-License-Identifier: Apache-2.0
//
// Elements of a window lie as far apart in all windows of a row that reach no
// padding, so a row is a loop over a few streams, each read once from memory
// and as often as windows overlap from the cache. Where that is too often, as
// in windows of 5 x 5 at every place, one axis after the other is faster.
#include "cpu/pool/pool.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/arithmetic.h"
#include "cpu/clones.h"
#include "cpu/elements.h"

namespace jax_layout {
namespace {

constexpr int64_t kChunk = 256;    // channels that are reduced at a time
constexpr int64_t kMostTaps = 64;  // elements of a window
constexpr int64_t kTaskElements = 64 << 10;

struct Sum {
  template <typename T>
  static constexpr T kStart = 0;
  template <typename T, typename... More>
  static JAX_LAYOUT_INLINE T Of(T a, More... more) {
    return (a + ... + more);
  }
};
// NaN if one is. Without a branch, from which compilers would make many.
struct Max {
  template <typename T>
  static constexpr T kStart = -std::numeric_limits<T>::infinity();
  template <typename T, typename... More>
  static JAX_LAYOUT_INLINE T Of(T a, More... more) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    T most = a;
    ((most = most > more ? most : more), ...);
    return std::bit_cast<T>(std::bit_cast<Bits>(most) | Nan<Bits>(a, more...));
  }

 private:
  template <typename Bits, typename T, typename... More>
  static JAX_LAYOUT_INLINE Bits Nan(T a, T b, More... more) {
    const Bits all = -static_cast<Bits>(__builtin_isunordered(a, b));
    if constexpr (sizeof...(more) > 0) return all | Nan<Bits>(more...);
    return all;
  }
  template <typename Bits, typename T>
  static JAX_LAYOUT_INLINE Bits Nan(T a) {
    return Nan<Bits>(a, a);
  }
};

// How often rows are reduced, and from where to where arrays advance.
struct Repeat {
  int64_t times, from, to;
};

// y[j] = the reduction of rows[i][j] over i.
template <typename Op, typename From, typename To, size_t... i>
JAX_LAYOUT_INLINE void ReduceRows(const typename From::Stored* const* rows,
                                  std::index_sequence<i...>, int64_t n,
                                  const Repeat& repeat,
                                  typename To::Stored* y) {
  const typename From::Stored* const x[] = {rows[i]...};
  for (int64_t r = 0; r < repeat.times; ++r) {
    const int64_t from = r * repeat.from;
    typename To::Stored* const to = y + r * repeat.to;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      to[j] = To::Store(Op::Of(From::Load(x[i][from + j])...));
    }
  }
}

// The same, of any number of rows.
template <typename Op, typename From, typename To>
JAX_LAYOUT_INLINE void ReduceMany(const typename From::Stored* const* rows,
                                  int64_t count, int64_t n,
                                  const Repeat& repeat,
                                  typename To::Stored* y) {
  using Wide = typename From::Sum;
  alignas(64) Wide sum[kChunk];
  for (int64_t r = 0; r < repeat.times; ++r) {
    for (int64_t j = 0; j < n; j += kChunk) {
      const int64_t width = std::min(kChunk, n - j);
      std::fill_n(sum, width, Op::template kStart<Wide>);
      for (int64_t i = 0; i < count; ++i) {
        const typename From::Stored* x = rows[i] + r * repeat.from + j;
        for (int64_t k = 0; k < width; ++k)
          sum[k] = Op::Of(sum[k], From::Load(x[k]));
      }
      for (int64_t k = 0; k < width; ++k)
        y[r * repeat.to + j + k] = To::Store(sum[k]);
    }
  }
}

template <typename Op, typename From, typename To>
JAX_LAYOUT_INLINE void Reduce(const typename From::Stored* const* rows,
                              int64_t count, int64_t n, const Repeat& repeat,
                              typename To::Stored* y) {
  const auto some = [&]<size_t k>(
                        std::integral_constant<size_t, k>) JAX_LAYOUT_LAMBDA {
    ReduceRows<Op, From, To>(rows, std::make_index_sequence<k>(), n, repeat, y);
  };
  switch (count) {  // those of windows of 2, 3, 2 x 2, 2 x 2 x 2 and 3 x 3
    case 2:
      return some(std::integral_constant<size_t, 2>());
    case 3:
      return some(std::integral_constant<size_t, 3>());
    case 4:
      return some(std::integral_constant<size_t, 4>());
    case 8:
      return some(std::integral_constant<size_t, 8>());
    case 9:
      return some(std::integral_constant<size_t, 9>());
    default:
      return ReduceMany<Op, From, To>(rows, count, n, repeat, y);
  }
}

// Which elements of window j there are: [first, last).
struct Taps {
  int64_t first, last;
};
JAX_LAYOUT_INLINE Taps TapsOf(const Windows& w, int64_t j) {
  const int64_t start = j * w.stride - w.low;
  const int64_t first = start < 0 ? CeilDiv(-start, w.dilation) : 0;
  const int64_t room = w.extent - start;
  const int64_t last = room > 0 ? CeilDiv(room, w.dilation) : 0;
  return {std::min(first, w.size), std::min(last, w.size)};
}

// Windows [begin, end) of a row of results.
struct Part {
  int64_t row, begin, end;
};

template <typename Op, typename From, typename To>
JAX_LAYOUT_INLINE void PoolPart(const PoolProblem& p, const Part& part,
                                const void* data, void* result) {
  const auto* x = static_cast<const typename From::Stored*>(data);
  auto* y = static_cast<typename To::Stored*>(result) +
            (part.row * p.windows[2].out + part.begin) * p.inner;
  const Windows &a = p.windows[0], &b = p.windows[1], &c = p.windows[2];
  const int64_t j = part.row % b.out, i = part.row / b.out % a.out;
  const int64_t outer = part.row / b.out / a.out;
  const Taps over = TapsOf(a, i), down = TapsOf(b, j);
  // Windows that are whole along the row are [inside, outside).
  const int64_t inside =
      std::clamp(CeilDiv(c.low, c.stride), part.begin, part.end);
  const int64_t room = c.extent - 1 - (c.size - 1) * c.dilation + c.low;
  const int64_t outside =
      room < 0 ? inside : std::clamp(room / c.stride + 1, inside, part.end);
  const typename From::Stored* taps[kMostTaps];
  for (int64_t k = part.begin; k < part.end;) {
    const Taps along = TapsOf(c, k);
    int64_t count = 0;
    for (int64_t t = over.first; t < over.last; ++t) {
      const int64_t plane =
          outer * a.extent + i * a.stride + t * a.dilation - a.low;
      for (int64_t u = down.first; u < down.last; ++u) {
        const int64_t line =
            plane * b.extent + j * b.stride + u * b.dilation - b.low;
        const int64_t first = line * c.extent + k * c.stride - c.low;
        for (int64_t v = along.first; v < along.last; ++v)
          taps[count++] = x + (first + v * c.dilation) * p.inner;
      }
    }
    const int64_t windows = k == inside && k < outside ? outside - inside : 1;
    Reduce<Op, From, To>(taps, count, p.inner,
                         {windows, c.stride * p.inner, p.inner}, y);
    k += windows;
    y += windows * p.inner;
  }
}

using Function = decltype(&PoolPart<Sum, Bf16, Plain<float>>);
// Of each kind for a type, and for all types, as FunctionOf() numbers them.
template <Isa isa, typename T>
constexpr std::array<Function, 2> kKinds = {
    kCompiled<isa, PoolPart<Sum, T, Plain<typename T::Sum>>>,
    kCompiled<isa, PoolPart<Max, T, T>>};
template <Isa isa, typename... T>
constexpr std::array<std::array<Function, 2>, sizeof...(T)> kTypes = {
    kKinds<isa, T>...};
template <Isa isa>
constexpr const auto* kFunctions =
    kTypes<isa, Plain<float>, Plain<double>, Bf16>.data();

const Kernels<const std::array<Function, 2>*> kKernels(
    "pool", {
#ifdef __x86_64__
                {Isa::kAvx512, kFunctions<Isa::kAvx512>},
                {Isa::kAvx2, kFunctions<Isa::kAvx2>},
#endif
                {Isa::kPortable, kFunctions<Isa::kPortable>}});

Status FunctionOf(const PoolProblem& p, Function* function) {
  const auto* functions = kKernels.Take();
  const int kind = static_cast<int>(p.kind);
  switch (p.type) {
    case DType::kF32:
      *function = functions[0][kind];
      return Status::Ok();
    case DType::kF64:
      *function = functions[1][kind];
      return Status::Ok();
    case DType::kBF16:
      *function = functions[2][kind];
      return Status::Ok();
    default:
      return Status::Error("pool: x must be float32, float64 or bfloat16.");
  }
}

}  // namespace

Status Pool(const PoolProblem& problem, const void* x, void* y,
            const Executor& executor) {
  const PoolProblem& p = problem;
  const Windows &a = p.windows[0], &b = p.windows[1], &c = p.windows[2];
  if (a.size * b.size * c.size > kMostTaps)
    return Status::Error("pool: windows are too large.");
  Function function;
  const Status known = FunctionOf(p, &function);
  if (!known.ok()) return known;
  const int64_t rows = p.outer * a.out * b.out;
  const int64_t cost = p.inner * a.size * b.size * c.size;  // of a window
  const int64_t most = std::max<int64_t>(kTaskElements / cost, 1);
  const int64_t cuts = CeilDiv(c.out, most);
  const int64_t together = std::max<int64_t>(most / c.out, 1);
  executor.ParallelForParts(rows * cuts, together, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t cut = i % cuts;
      function(p, {i / cuts, cut * c.out / cuts, (cut + 1) * c.out / cuts}, x,
               y);
    }
  });
  return Status::Ok();
}

}  // namespace jax_layout
