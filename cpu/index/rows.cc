// SPDX-License-Identifier: Apache-2.0
#include "cpu/index/rows.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/clones.h"
#include "cpu/elements.h"

// The loops below are compiled for what memory needs; more is not faster.

namespace jax_layout {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 8;          // rows of sums that are prefetched
constexpr int64_t kMostAhead = 1024;   // bytes of each, and of a row of source
constexpr int64_t kAheadBytes = 4096;  // of source

// As ResolveIndex, for all.
template <typename Index>
JAX_LAYOUT_INLINE bool Resolve(const void* indices, int64_t n, int64_t extent,
                               bool clip, bool wrap, int64_t* rows) {
  const auto* index = static_cast<const Index*>(indices);
  const int64_t from_end = wrap ? extent : 0;
  const int64_t below = clip ? 0 : -1, above = clip ? extent - 1 : -1;
  int64_t all = 0;
#pragma GCC ivdep  // rows are none of the indices
  for (int64_t i = 0; i < n; ++i) {
    const int64_t given = index[i];
    const int64_t at = given + (given < 0 ? from_end : 0);
    const int64_t row = at < extent ? at : above;
    rows[i] = at < 0 ? below : row;
    all |= rows[i];
  }
  return all >= 0;
}

template <Reduction reduction, typename T>
constexpr T Nothing() {
  using Limits = std::numeric_limits<T>;
  if constexpr (reduction == Reduction::kSum) return T{};
  constexpr bool kMax = reduction == Reduction::kMax;
  if constexpr (Limits::has_infinity) {
    return kMax ? -Limits::infinity() : Limits::infinity();
  }
  return kMax ? Limits::lowest() : Limits::max();
}

template <Reduction reduction, typename T>
JAX_LAYOUT_INLINE T Reduce(T a, T b) {
  if constexpr (reduction == Reduction::kSum) {
    return static_cast<T>(a + b);
  } else {
    // As the instruction picks, which gives its second operand if one is NaN;
    // a branch on both at once is often guessed wrong. What waits for a, the
    // sum, is that alone.
    const T extreme = (reduction == Reduction::kMax ? b > a : b < a) ? b : a;
    return b != b ? b : extreme;
  }
}

template <typename Element>
JAX_LAYOUT_INLINE void LoadSums(const char* x, int64_t n,
                                typename Element::Sum* sum) {
  const auto* from = reinterpret_cast<const typename Element::Stored*>(x);
  for (int64_t i = 0; i < n; ++i) sum[i] = Element::Load(from[i]);
}

template <Reduction reduction, typename Element>
JAX_LAYOUT_INLINE void SumRow(const RowSum& r) {
  using Stored = typename Element::Stored;
  using Sum = typename Element::Sum;
  Sum sum[kSums];
  auto* y = reinterpret_cast<Stored*>(r.y);
  const int64_t n = r.width;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(Stored));
  // The first row is an extreme, but no sum, which -0 is not: 0 + -0 is 0.
  const bool begins = r.x == nullptr && reduction != Reduction::kSum;
  if (r.x != nullptr) {
    LoadSums<Element>(r.x, n, sum);
  } else if (!begins) {
    std::fill_n(sum, n, Nothing<reduction, Sum>());
  }
  const int64_t ahead = std::max<int64_t>(1, kAheadBytes / bytes);
  for (int64_t k = 0; k < r.num_pairs; ++k) {
    if (k + ahead < r.num_ahead) {
      const char* next = r.source + r.pairs[k + ahead].source * r.stride;
      for (int64_t at = 0; at < bytes; at += kLine) {
        __builtin_prefetch(next + at);
      }
    }
    const char* const source = r.source + r.pairs[k].source * r.stride;
    if (begins && k == 0) {
      LoadSums<Element>(source, n, sum);
      continue;
    }
    const auto* from = reinterpret_cast<const Stored*>(source);
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = Reduce<reduction>(sum[i], Element::Load(from[i]));
    }
  }
  alignas(kLine) Stored out[kSums];
  auto* to = r.stream != nullptr ? out : y;
  for (int64_t i = 0; i < n; ++i) to[i] = Element::Store(sum[i]);
  if (r.stream == nullptr) return;
  const int64_t zero = 0;
  PermuteBlock block = {};
  block.x = reinterpret_cast<const char*>(out);
  block.y = r.y;
  block.x_offset = block.y_offset = &zero;
  block.rows = block.cols = 1;
  block.bytes = bytes;
  block.stream = true;
  r.stream(block);
}

template <Reduction reduction, typename Element>
JAX_LAYOUT_INLINE void SumParts(const PartSum& r) {
  using Sum = typename Element::Sum;
  constexpr int64_t kItem = sizeof(typename Element::Stored);
  Sum sum[kSums];
  for (int64_t first = 0; first < r.width; first += kSums) {
    const int64_t n = std::min(kSums, r.width - first);
    if (r.x != nullptr) {
      LoadSums<Element>(r.x + first * kItem, n, sum);
    } else {
      std::fill_n(sum, n, Nothing<reduction, Sum>());
    }
    for (int64_t k = 0; k < r.num_parts; ++k) {
      const auto* part =
          reinterpret_cast<const Sum*>(r.parts + k * r.stride) + first;
      for (int64_t i = 0; i < n; ++i) {
        sum[i] = Reduce<reduction>(sum[i], part[i]);
      }
    }
    auto* to = reinterpret_cast<typename Element::Stored*>(r.y) + first;
    for (int64_t i = 0; i < n; ++i) to[i] = Element::Store(sum[i]);
  }
}

// Rows of a few elements: those of several are on their way at once, without
// being asked for.
template <Reduction reduction, typename Element, int kWidth>
JAX_LAYOUT_INLINE void AddNarrow(const typename Element::Stored* from,
                                 const int64_t* at, int64_t rows,
                                 typename Element::Sum* to) {
  for (int64_t i = 0; i < rows; ++i) {
    if (at[i] < 0) continue;
    typename Element::Sum* sum = to + at[i] * kWidth;
    typename Element::Sum next[kWidth];  // is no row of source
    for (int k = 0; k < kWidth; ++k) {
      next[k] = Reduce<reduction>(sum[k], Element::Load(from[i * kWidth + k]));
    }
    std::copy_n(next, kWidth, sum);
  }
}

template <Reduction reduction, typename Element>
JAX_LAYOUT_INLINE void AddRows(const void* source, const int64_t* at,
                               int64_t rows, int64_t width, int64_t stride,
                               void* sums) {
  using Sum = typename Element::Sum;
  const auto* from = static_cast<const typename Element::Stored*>(source);
  auto* to = static_cast<Sum*>(sums);
  if (width == stride) {
    switch (width) {
      case 1:
        return AddNarrow<reduction, Element, 1>(from, at, rows, to);
      case 2:
        return AddNarrow<reduction, Element, 2>(from, at, rows, to);
      case 3:
        return AddNarrow<reduction, Element, 3>(from, at, rows, to);
      case 4:
        return AddNarrow<reduction, Element, 4>(from, at, rows, to);
    }
  }
  constexpr int64_t kItem = sizeof(*from);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(Sum));
  const int64_t ahead = std::min(bytes, kMostAhead);
  const int64_t later = std::max<int64_t>(1, kAheadBytes / (stride * kItem));
  const auto fetch = [&](int64_t i) JAX_LAYOUT_LAMBDA {
    const auto* next = reinterpret_cast<const char*>(
        to + at[std::min(i + kAhead, rows - 1)] * stride);
    for (int64_t k = 0; k < ahead; k += kLine) __builtin_prefetch(next + k, 1);
    __builtin_prefetch(next + bytes - 1, 1);
    const auto* soon = reinterpret_cast<const char*>(
        from + std::min(i + later, rows - 1) * stride);
    for (int64_t k = 0; k < std::min(width * kItem, kMostAhead); k += kLine) {
      __builtin_prefetch(soon + k);
    }
  };
  const bool is_short = bytes <= kLine;
  for (int64_t i = 0; i < rows; ++i) {
    if (!is_short) fetch(i);
    if (at[i] < 0) continue;
    const auto* row = from + i * stride;
    Sum* sum = to + at[i] * stride;
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k) {
      sum[k] = Reduce<reduction>(sum[k], Element::Load(row[k]));
    }
  }
}

template <Reduction reduction, typename Element>
void Start(void* y, int64_t n) {
  using Sum = typename Element::Sum;
  std::fill_n(static_cast<typename Element::Stored*>(y), n,
              Element::Store(Nothing<reduction, Sum>()));
}

// The loops of one level.
constexpr int kTypes = static_cast<int>(SumType::kU64) + 1;
constexpr int kReductions = static_cast<int>(Reduction::kMin) + 1;
struct IndexFunctions {
  bool (*resolve[2])(const void*, int64_t, int64_t, bool, bool,
                     int64_t*);  // [wide]
  RowFunctions rows[kReductions][kTypes];
};

template <Isa isa, Reduction reduction, typename Element>
constexpr RowFunctions kRows = {kCompiled<isa, SumRow<reduction, Element>>,
                                kCompiled<isa, SumParts<reduction, Element>>,
                                kCompiled<isa, AddRows<reduction, Element>>,
                                Start<reduction, Element>,
                                Start<reduction, Plain<typename Element::Sum>>,
                                sizeof(typename Element::Sum)};

// Integers, whose signed and unsigned sums are the same.
template <Isa isa, Reduction reduction, typename Signed, typename Unsigned>
constexpr const RowFunctions& kIntegers = kRows<
    isa, reduction,
    Plain<std::conditional_t<reduction == Reduction::kSum, Unsigned, Signed>>>;

#define JAX_LAYOUT_ROWS(reduction)               \
  {kRows<isa, reduction, Plain<float>>,          \
   kRows<isa, reduction, Plain<double>>,         \
   kRows<isa, reduction, Bf16>,                  \
   kRows<isa, reduction, F16>,                   \
   kIntegers<isa, reduction, int8_t, uint8_t>,   \
   kIntegers<isa, reduction, int16_t, uint16_t>, \
   kIntegers<isa, reduction, int32_t, uint32_t>, \
   kIntegers<isa, reduction, int64_t, uint64_t>, \
   kRows<isa, reduction, Plain<uint8_t>>,        \
   kRows<isa, reduction, Plain<uint16_t>>,       \
   kRows<isa, reduction, Plain<uint32_t>>,       \
   kRows<isa, reduction, Plain<uint64_t>>}
template <Isa isa>
constexpr IndexFunctions kFunctions = {
    {kCompiled<isa, Resolve<int32_t>>, kCompiled<isa, Resolve<int64_t>>},
    {JAX_LAYOUT_ROWS(Reduction::kSum), JAX_LAYOUT_ROWS(Reduction::kMax),
     JAX_LAYOUT_ROWS(Reduction::kMin)}};
#undef JAX_LAYOUT_ROWS

const Kernels<const IndexFunctions*> kKernels(
    "index", {
#ifdef __x86_64__
                 {Isa::kAvx2, &kFunctions<Isa::kAvx2>},
#endif
                 {Isa::kPortable, &kFunctions<Isa::kPortable>}});

}  // namespace

const RowFunctions& RowFunctionsOf(Reduction reduction, SumType type) {
  return kKernels.Take()
      ->rows[static_cast<int>(reduction)][static_cast<int>(type)];
}

bool ResolveRows(const IndexPlan& p, const void* index, int64_t first,
                 int64_t n, int64_t* rows) {
  const auto* from = static_cast<const char*>(index) + first * (p.wide ? 8 : 4);
  return kKernels.Take()->resolve[p.wide](from, n, p.extent, p.clip, p.wrap,
                                          rows);
}

}  // namespace jax_layout
