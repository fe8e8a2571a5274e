// SPDX-License-Identifier: Apache-2.0
//
// Rows that an index names: copied as blocks of the permute are, and summed.
#include "cpu/index/index.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "core/arithmetic.h"
#include "cpu/clones.h"
#include "cpu/pages.h"
#include "cpu/permute/permute.h"

// The loops below are compiled for what memory needs; more is not faster.

namespace jax_layout {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;
// Larger results leave by non-temporal stores.
constexpr int64_t kStreamBytes = 12 << 20;
constexpr int64_t kLine = 64;
// Shorter rows are added sooner than sorted.
constexpr int64_t kLongRow = 1024;
constexpr int64_t kAhead = 8;  // rows that are prefetched

constexpr int64_t kRows = 1024;  // indices resolved at a time

// As ResolveIndex, for all; returns whether all name a row.
template <typename Index>
JAX_LAYOUT_INLINE bool Resolve(const void* indices, int64_t n, int64_t extent,
                               bool clip, int64_t* rows) {
  const auto* index = static_cast<const Index*>(indices);
  int64_t all = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = index[i] + (index[i] < 0 ? extent : 0);
    const int64_t outside = clip ? (at < 0 ? 0 : extent - 1) : -1;
    rows[i] = at >= 0 && at < extent ? at : outside;
    all |= rows[i];
  }
  return all >= 0;
}

// --- index_select

template <int kBytes>
struct alignas(kBytes) Chunk {
  char byte[kBytes];
};

// y[i] = x[at[i]] for elements of kBytes.
template <int kBytes>
void Gather(const char* x, const int64_t* at, int64_t rows, char* y) {
  const auto* from = reinterpret_cast<const Chunk<kBytes>*>(x);
  auto* to = reinterpret_cast<Chunk<kBytes>*>(y);
  for (int64_t i = 0; i < rows; ++i) to[i] = from[at[i]];
}

using GatherFunction = void(const char*, const int64_t*, int64_t, char*);

GatherFunction* GatherOf(int64_t bytes) {
  switch (bytes) {
    case 1:
      return Gather<1>;
    case 2:
      return Gather<2>;
    case 4:
      return Gather<4>;
    case 8:
      return Gather<8>;
    case 16:
      return Gather<16>;
    default:
      return nullptr;
  }
}

// --- index_add

// An element in memory, and in the sum.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum Load(Stored v) { return v; }
  static Stored Store(Sum v) { return v; }
};
struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum Load(Stored v) { return FloatOfBf16(v); }
  static Stored Store(Sum v) { return Bf16OfFloat(v); }
};
struct F16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum Load(Stored v) { return FloatOfF16(v); }
  static Stored Store(Sum v) { return F16OfFloat(v); }
};

// A pair of `index` says where a row of source goes. Sorted, those of a row of
// y are neighbours, in the order in which they are added.
struct Pair {
  uint32_t row, source;
  bool operator<(const Pair& other) const {
    return row != other.row ? row < other.row : source < other.source;
  }
};

constexpr int64_t kSums = 1024;  // elements of a row that are summed at a time

// `width` elements of one row of y: those of x + the rows of source.
struct RowSum {
  const char* source;
  int64_t stride;  // bytes from one row of source to the next
  const Pair* pairs;
  int64_t num_pairs;
  const char* x;  // null: zero
  char* y;
  int64_t width;
  BlockFunction* stream;  // null: ordinary stores
};

template <typename Element>
JAX_LAYOUT_INLINE void SumRow(const RowSum& r) {
  using Stored = typename Element::Stored;
  typename Element::Sum sum[kSums];
  auto* y = reinterpret_cast<Stored*>(r.y);
  const int64_t n = r.width;
  if (r.x != nullptr) {
    const auto* x = reinterpret_cast<const Stored*>(r.x);
    for (int64_t i = 0; i < n; ++i) sum[i] = Element::Load(x[i]);
  } else {
    std::fill_n(sum, n, typename Element::Sum{});
  }
  for (int64_t k = 0; k < r.num_pairs; ++k) {
    const auto* source = reinterpret_cast<const Stored*>(
        r.source + r.pairs[k].source * r.stride);
    for (int64_t i = 0; i < n; ++i) sum[i] += Element::Load(source[i]);
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
  block.bytes = n * static_cast<int64_t>(sizeof(Stored));
  block.stream = true;
  r.stream(block);
}

// y[at[i]] += source[i], for `width` elements of rows that are `stride` apart;
// a negative at[i] names none.
template <typename T>
JAX_LAYOUT_INLINE void AddRows(const void* source, const int64_t* at,
                               int64_t rows, int64_t width, int64_t stride,
                               void* y) {
  const auto* from = static_cast<const T*>(source);
  auto* to = static_cast<T*>(y);
  if (stride == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      if (at[i] >= 0) to[at[i]] += from[i];
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t next = at[std::min(i + kAhead, rows - 1)] * stride;
    __builtin_prefetch(to + next, 1);
    __builtin_prefetch(to + next + width - 1, 1);
    if (at[i] < 0) continue;
    T* row = to + at[i] * stride;
    for (int64_t k = 0; k < width; ++k) row[k] += from[i * stride + k];
  }
}

struct AddFunctions {
  void (*sum_row)(const RowSum&);
  void (*add_rows)(const void*, const int64_t*, int64_t, int64_t, int64_t,
                   void*);  // null where sums are wider than elements
};

// The loops of one level.
struct IndexFunctions {
  bool (*resolve[2])(const void*, int64_t, int64_t, bool, int64_t*);  // [wide]
  AddFunctions add[8];  // of each SumType
};

template <Isa isa, typename T>
constexpr AddFunctions kAdd = {kCompiled<isa, SumRow<Plain<T>>>,
                               kCompiled<isa, AddRows<T>>};
template <Isa isa, typename Element>
constexpr AddFunctions kAddWidened = {kCompiled<isa, SumRow<Element>>, nullptr};
template <Isa isa>
constexpr IndexFunctions kFunctions = {
    {kCompiled<isa, Resolve<int32_t>>, kCompiled<isa, Resolve<int64_t>>},
    {kAdd<isa, float>, kAdd<isa, double>, kAddWidened<isa, Bf16>,
     kAddWidened<isa, F16>, kAdd<isa, uint8_t>, kAdd<isa, uint16_t>,
     kAdd<isa, uint32_t>, kAdd<isa, uint64_t>}};

const Kernels<const IndexFunctions*> kKernels(
    "index", {
#ifdef __x86_64__
                 {Isa::kAvx2, &kFunctions<Isa::kAvx2>},
#endif
                 {Isa::kPortable, &kFunctions<Isa::kPortable>}});

AddFunctions AddFunctionsOf(SumType type) {
  return kKernels.Take()->add[static_cast<int>(type)];
}

bool ResolveAll(const IndexPlan& p, const void* index, int64_t first, int64_t n,
                int64_t* rows) {
  const auto* from = static_cast<const char*>(index) + first * (p.wide ? 8 : 4);
  return kKernels.Take()->resolve[p.wide](from, n, p.extent, p.clip, rows);
}

template <typename T>
std::unique_ptr<T[]> Scratch(int64_t n) {
  return std::unique_ptr<T[]>(new (std::nothrow) T[static_cast<size_t>(n)]);
}

Status OutOfMemory() { return Status::Error("index_add: out of memory."); }

// The pairs of one batch, sorted; returns how many there are.
int64_t SortPairs(const IndexPlan& p, const void* index, int64_t first,
                  Pair* pairs) {
  const auto row_of = [&](int64_t i) {
    return ResolveIndex(IndexAt(index, p.wide, first + i), p.extent, p.clip);
  };
  // By counting, unless there are far more rows than indices.
  const auto starts =
      p.extent <= 16 * p.count ? Scratch<uint32_t>(p.extent + 1) : nullptr;
  int64_t kept = 0;
  if (starts == nullptr) {
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t row = row_of(i);
      if (row < 0) continue;
      pairs[kept++] = {static_cast<uint32_t>(row), static_cast<uint32_t>(i)};
    }
    std::sort(pairs, pairs + kept);
    return kept;
  }
  std::fill_n(starts.get(), p.extent + 1, 0u);
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t row = row_of(i);
    if (row >= 0) ++starts[row + 1];
  }
  for (int64_t r = 0; r < p.extent; ++r) starts[r + 1] += starts[r];
  kept = starts[p.extent];
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t row = row_of(i);
    if (row < 0) continue;
    pairs[starts[row]++] = {static_cast<uint32_t>(row),
                            static_cast<uint32_t>(i)};
  }
  return kept;
}

// y = x, or zero, for `bytes` from an offset.
void Start(const char* x, char* y, int64_t offset, int64_t bytes) {
  if (x == nullptr) {
    std::memset(y + offset, 0, static_cast<size_t>(bytes));
  } else {
    std::memcpy(y + offset, x + offset, static_cast<size_t>(bytes));
  }
}

// Every row of y is written once, by the task that owns it; if y has been
// `started`, only those to which something is added.
Status AddByRow(const IndexPlan& p, SumType type, const void* index,
                const char* source, const char* x, char* y, bool started,
                const Executor& executor) {
  const auto pairs = Scratch<Pair>(p.batch * p.count);
  const auto kept = Scratch<int64_t>(p.batch);
  if (pairs == nullptr || kept == nullptr) return OutOfMemory();
  executor.ParallelFor(p.batch, [&](int64_t b) {
    kept[b] = SortPairs(p, index, b * p.count, pairs.get() + b * p.count);
  });
  const int64_t row_bytes = p.inner_bytes();
  const int64_t slice = p.extent * row_bytes;
  const int64_t width = std::min(p.inner, kSums);
  const int64_t parts = CeilDiv(p.inner, width);  // of a row
  const bool zeroed = started && x == nullptr;
  const int64_t block =
      std::max<int64_t>(1, (zeroed ? kHugePage : kTaskBytes) / row_bytes);
  const int64_t blocks = CeilDiv(p.extent, block);
  const bool stream = !started && p.batch * p.outer * slice >= kStreamBytes &&
                      row_bytes >= 4 * kLine;
  BlockFunction* copy = stream ? FunctionsOf().copy : nullptr;
  const auto sum_row = AddFunctionsOf(type).sum_row;
  executor.ParallelFor(p.batch * p.outer * blocks * parts, [&](int64_t task) {
    const int64_t part = task % parts;
    const int64_t first = task / parts % blocks * block;
    const int64_t end = std::min(first + block, p.extent);
    const int64_t outer = task / parts / blocks;
    const int64_t batch = outer / p.outer;
    const int64_t column = outer * slice + part * width * p.itemsize;
    RowSum sum = {};
    sum.source =
        source + outer * p.count * row_bytes + part * width * p.itemsize;
    sum.stride = row_bytes;
    sum.width = std::min(width, p.inner - part * width);
    sum.stream = copy;
    const Pair* pair = pairs.get() + batch * p.count;
    const Pair* last = pair + kept[batch];
    pair = std::lower_bound(pair, last, Pair{static_cast<uint32_t>(first), 0});
    // Rows up to `stop`, to which nothing is added.
    int64_t row = first;
    const auto pass = [&](int64_t stop) {
      if (started) return;
      const bool whole = parts == 1;
      const int64_t rows = whole ? 1 : stop - row;
      const int64_t bytes =
          whole ? (stop - row) * row_bytes : sum.width * p.itemsize;
      for (int64_t r = row; r < row + rows; ++r) {
        Start(x, y, column + r * row_bytes, bytes);
      }
    };
    while (pair != last && pair->row < end) {
      pass(pair->row);
      row = pair->row;
      sum.pairs = pair;
      while (pair != last && pair->row == row) ++pair;
      sum.num_pairs = pair - sum.pairs;
      sum.x = x != nullptr ? x + column + row * row_bytes : nullptr;
      sum.y = y + column + row * row_bytes;
      sum_row(sum);
      ++row;
    }
    pass(end);
    if (stream) FenceStores();
  });
  return Status::Ok();
}

// In the order of the index: a task owns some slices of y, or a part of the
// rows of one.
Status AddInOrder(const IndexPlan& p, SumType type, const void* index,
                  const char* source, const char* x, char* y, bool started,
                  const Executor& executor) {
  const int64_t row_bytes = p.inner_bytes();
  const int64_t slice = p.extent * row_bytes;
  const auto add_rows = AddFunctionsOf(type).add_rows;
  if (!started) {
    const int64_t size = p.batch * p.outer * slice;
    executor.ParallelFor(CeilDiv(size, kTaskBytes), [&](int64_t task) {
      const int64_t from = task * kTaskBytes;
      Start(x, y, from, std::min(kTaskBytes, size - from));
    });
  }
  const int64_t wanted = 2 * executor.num_threads();  // tasks
  const int64_t together =
      std::clamp<int64_t>(kTaskBytes / slice, 1, CeilDiv(p.outer, wanted));
  const int64_t groups = CeilDiv(p.outer, together);
  const int64_t lines = CeilDiv(row_bytes, 2 * kLine);
  const int64_t width =  // whole lines, and the one that a neighbour fetches
      CeilDiv(lines, CeilDiv(wanted, p.batch * groups)) * 2 * kLine /
      p.itemsize;
  const int64_t parts = CeilDiv(p.inner, width);
  executor.ParallelFor(p.batch * groups * parts, [&](int64_t task) {
    const int64_t column = task % parts * width;
    const int64_t group = task / parts % groups;
    const int64_t batch = task / parts / groups;
    const int64_t begin = group * together;
    const int64_t end = std::min(begin + together, p.outer);
    int64_t rows[kRows];
    for (int64_t first = 0; first < p.count; first += kRows) {
      const int64_t n = std::min(kRows, p.count - first);
      ResolveAll(p, index, batch * p.count + first, n, rows);
      for (int64_t o = batch * p.outer + begin; o < batch * p.outer + end;
           ++o) {
        const int64_t offset = column * p.itemsize;
        add_rows(source + (o * p.count + first) * row_bytes + offset, rows, n,
                 std::min(width, p.inner - column), p.inner,
                 y + o * slice + offset);
      }
    }
  });
  return Status::Ok();
}

}  // namespace

Status IndexSelect(const IndexPlan& plan, const void* x, const void* index,
                   const uint8_t* fill, void* y, const Executor& executor) {
  const IndexPlan& p = plan;
  const int64_t row_bytes = p.inner_bytes();
  const int64_t size = p.batch * p.outer * p.count * row_bytes;
  TouchPages(static_cast<char*>(y), size, executor);
  const PermuteFunctions& functions = FunctionsOf();
  GatherFunction* const gather = GatherOf(row_bytes);
  BlockFunction* const copy =
      row_bytes < kLine ? functions.move : functions.copy;
  // A task: some slices, some rows of each, a part of a row if it is large.
  const int64_t part = std::min(row_bytes, kTaskBytes);
  const int64_t parts = CeilDiv(row_bytes, part);
  const int64_t rows =
      std::min({p.count, kRows, std::max<int64_t>(1, kTaskBytes / part)});
  const int64_t blocks = CeilDiv(p.count, rows);
  const int64_t slices =
      std::min(p.outer, std::max<int64_t>(1, kTaskBytes / (rows * part)));
  const int64_t groups = CeilDiv(p.outer, slices);
  const bool stream = size >= kStreamBytes && row_bytes >= 4 * kLine &&
                      functions.vector_bytes > 16;
  executor.ParallelFor(p.batch * groups * blocks * parts, [&](int64_t task) {
    const int64_t offset = task % parts * part;
    const int64_t bytes = std::min(part, row_bytes - offset);
    const int64_t first = task / parts % blocks * rows;
    const int64_t n = std::min(rows, p.count - first);
    const int64_t group = task / parts / blocks % groups;
    const int64_t batch = task / parts / blocks / groups;
    int64_t at[kRows];
    int64_t none[kRows];  // rows of y that no row of x goes to
    int64_t num_none = 0;
    const int64_t zero = 0;
    if (!ResolveAll(p, index, batch * p.count + first, n, at)) {
      for (int64_t i = 0; i < n; ++i) {
        if (at[i] >= 0) continue;
        none[num_none++] = i;
        at[i] = 0;
      }
    }
    if (gather == nullptr) {
      for (int64_t i = 0; i < n; ++i) at[i] *= row_bytes;
    }
    const int64_t end = std::min((group + 1) * slices, p.outer);
    for (int64_t o = group * slices; o < end; ++o) {
      const int64_t slice = batch * p.outer + o;
      const char* from =
          static_cast<const char*>(x) + slice * p.extent * row_bytes + offset;
      char* to = static_cast<char*>(y) + (slice * p.count + first) * row_bytes +
                 offset;
      if (gather != nullptr) {
        gather(from, at, n, to);
      } else {
        PermuteBlock block = {};
        block.x = from;
        block.y = to;
        block.x_offset = at;
        block.y_offset = &zero;
        block.rows = n;
        block.cols = 1;
        block.bytes = bytes;
        block.stream = stream;
        copy(block);
      }
      for (int64_t i = 0; i < num_none; ++i) {
        char* row = to + none[i] * row_bytes;
        for (int64_t k = 0; k < bytes; k += p.itemsize) {
          std::memcpy(row + k, fill, p.itemsize);
        }
      }
    }
    if (stream) FenceStores();
  });
  return Status::Ok();
}

Status IndexAdd(const IndexPlan& plan, SumType type, const void* index,
                const int32_t*, const void* source, const void* x, void* y,
                const Executor& executor) {
  const IndexPlan& p = plan;
  const auto* added = static_cast<const char*>(source);
  const auto* from = static_cast<const char*>(x);
  auto* to = static_cast<char*>(y);
  const bool in_place = from == to;
  const int64_t size = p.batch * p.outer * p.extent * p.inner_bytes();
  const bool zeroed = from == nullptr && ZeroPages(to, size);
  const bool started = in_place || zeroed;  // y holds what is added to
  const bool many = p.batch * p.outer >= 2 * executor.num_threads();
  const bool in_order = AddFunctionsOf(type).add_rows != nullptr &&
                        (in_place || many || p.inner_bytes() < kLongRow);
  // Row by row, whose thread is the first to write to a page makes it.
  if (!in_place && (in_order || !zeroed)) TouchPages(to, size, executor);
  return (in_order ? AddInOrder : AddByRow)(p, type, index, added, from, to,
                                            started, executor);
}

}  // namespace jax_layout
