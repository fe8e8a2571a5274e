// SPDX-License-Identifier: Apache-2.0
//
// Rows that are summed, or otherwise reduced, where an index says.
//
//   in parts   few rows of y: every part of source has sums of its own, which
//              are then added; one part, where they are wider than y's elements
//   in order   many slices, or short rows: a task owns slices or columns of y
//   by row     the indices are sorted, a task owns rows of y
//   few        y holds what is added to: one thread looks up whose rows are
//   whose
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <new>

#include "core/arithmetic.h"
#include "cpu/index/index.h"
#include "cpu/index/rows.h"
#include "cpu/isa.h"
#include "cpu/pages.h"
#include "cpu/permute/permute.h"

namespace jax_layout {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kLine = 64;
// Shorter rows are added sooner than sorted; those of an array that caches do
// not hold have to be shorter still.
constexpr int64_t kLongRow = 1024, kShortRow = 256;
constexpr int64_t kCached = 64 << 20;

template <typename T>
std::unique_ptr<T[]> Scratch(int64_t n) {
  return std::unique_ptr<T[]>(new (std::nothrow) T[static_cast<size_t>(n)]);
}

Status OutOfMemory() { return Status::Error("index_add: out of memory."); }

// What is reduced.
struct Job {
  const IndexPlan& p;
  const RowFunctions& functions;
  bool zero;  // nothing is zero
  const void* index;
  const char* source;
  const char* x;
  char* y;
  const Executor& executor;

  int64_t slices() const { return p.batch * p.outer; }
  int64_t slice() const { return p.extent * p.inner_bytes(); }

  // y = x, or nothing, for `bytes` from an offset.
  void Start(int64_t offset, int64_t bytes) const {
    if (x != nullptr) {
      std::memcpy(y + offset, x + offset, static_cast<size_t>(bytes));
    } else if (zero) {
      std::memset(y + offset, 0, static_cast<size_t>(bytes));
    } else {
      functions.start(y + offset, bytes / p.itemsize);
    }
  }
};

// --- in parts

int64_t SumBytes(const Job& job) {  // of a slice
  return job.p.extent * job.p.inner * job.functions.sum_bytes;
}

// Of a slice of source, a power of two; one where that does not pay. A matter
// of the plan alone, as it says in which order rows are added.
int64_t NumParts(const Job& job) {
  constexpr int64_t kMost = 64;
  constexpr int64_t kRowsPerSum = 16;  // what a part's own sums cost is little
  constexpr int64_t kPartBytes = 64 << 10;
  constexpr int64_t kSumBytes = 1 << 20;  // they stay in a core's cache
  const IndexPlan& p = job.p;
  if (SumBytes(job) > kSumBytes) return 1;
  const int64_t parts =
      std::max<int64_t>(1, std::min({CeilDiv(kMost, job.slices()),
                                     p.count / (kRowsPerSum * p.extent),
                                     p.count * p.inner_bytes() / kPartBytes}));
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(parts)));
}

// Whether sums of all of y, wider than its elements, take less time than to
// sort the indices of short rows.
bool AreSumsCheap(const Job& job) {
  constexpr int64_t kSumsPerIndex = 24;
  constexpr int64_t kMostBytes = 8 << 20;
  const IndexPlan& p = job.p;
  return job.functions.sum_bytes > p.itemsize && p.inner_bytes() < kLongRow &&
         job.slices() * SumBytes(job) <= kMostBytes &&
         p.extent * p.inner <= kSumsPerIndex * p.count;
}

Status AddInParts(const Job& job, int64_t parts) {
  const IndexPlan& p = job.p;
  const RowFunctions& functions = job.functions;
  const int64_t size = p.extent * p.inner;
  const int64_t stride = RoundUp(size * functions.sum_bytes, kLine);
  const auto sums = Scratch<char>(job.slices() * parts * stride);
  if (sums == nullptr) return OutOfMemory();
  const int64_t rows_per_part = CeilDiv(p.count, parts);
  job.executor.ParallelFor(job.slices() * parts, [&](int64_t task) {
    const int64_t slice = task / parts;
    const int64_t batch = slice / p.outer;
    const int64_t begin = task % parts * rows_per_part;
    const int64_t end = std::min(begin + rows_per_part, p.count);
    char* const sum = sums.get() + task * stride;
    functions.start_sums(sum, size);
    int64_t rows[kRows];
    for (int64_t first = begin; first < end; first += kRows) {
      const int64_t n = std::min(kRows, end - first);
      ResolveRows(p, job.index, batch * p.count + first, n, rows);
      functions.add_rows(
          job.source + (slice * p.count + first) * p.inner_bytes(), rows, n,
          p.inner, p.inner, sum);
    }
  });
  const int64_t block = std::min(size, 4 * kSums);
  const int64_t blocks = CeilDiv(size, block);
  job.executor.ParallelFor(job.slices() * blocks, [&](int64_t task) {
    const int64_t slice = task / blocks;
    const int64_t first = task % blocks * block;
    const int64_t offset = slice * job.slice() + first * p.itemsize;
    PartSum sum = {};
    sum.parts =
        sums.get() + slice * parts * stride + first * functions.sum_bytes;
    sum.num_parts = parts;
    sum.stride = stride;
    sum.x = job.x != nullptr ? job.x + offset : nullptr;
    sum.y = job.y + offset;
    sum.width = std::min(block, size - first);
    functions.sum_parts(sum);
  });
  return Status::Ok();
}

// --- by row

// The pairs of a batch lie from batch * count on, in the order of their rows.
struct Pairs {
  std::unique_ptr<Pair[]> all;
  std::unique_ptr<int64_t[]> kept;  // how many a batch has
};

// From one array to another that is as long, in the order of the rows from
// `first` on, of which there are `rows`. Those of a row stay in their order.
void SortBlock(const Pair* from, int64_t n, int64_t first, int64_t rows,
               uint32_t* starts, Pair* to) {
  if (rows > 16 * n) {
    std::copy_n(from, n, to);
    std::sort(to, to + n);
    return;
  }
  std::fill_n(starts, rows + 1, 0u);
  for (int64_t i = 0; i < n; ++i) ++starts[from[i].row - first + 1];
  for (int64_t r = 0; r < rows; ++r) starts[r + 1] += starts[r];
  for (int64_t i = 0; i < n; ++i) to[starts[from[i].row - first]++] = from[i];
}

// By counting, twice: into blocks of rows, then inside of each, whose counters
// a cache holds.
bool SortPairs(const Job& job, Pairs* sorted) {
  constexpr int64_t kBlockRows = 1024;
  constexpr int64_t kMostBlocks = 4096;
  constexpr int64_t kChunk = 8192;  // indices of a task, at least
  const IndexPlan& p = job.p;
  const int64_t block = std::max(kBlockRows, CeilDiv(p.extent, kMostBlocks));
  const int64_t blocks = CeilDiv(p.extent, block);
  const int64_t chunks =
      std::clamp<int64_t>(p.count / kChunk, 1, 4 * job.executor.num_threads());
  const int64_t chunk = CeilDiv(p.count, chunks);
  const auto pairs = Scratch<Pair>(p.batch * p.count);
  const auto at = Scratch<uint32_t>(p.batch * chunks * blocks);
  sorted->all = Scratch<Pair>(p.batch * p.count);
  sorted->kept = Scratch<int64_t>(p.batch);
  if (!pairs || !at || !sorted->all || !sorted->kept) return false;

  // f(block, pair) for every pair of a chunk.
  const auto pairs_of = [&](int64_t task, const auto& f) {
    const int64_t begin = task % chunks * chunk;
    const int64_t end = std::min(begin + chunk, p.count);
    int64_t rows[kRows];
    for (int64_t i = begin; i < end; i += kRows) {
      const int64_t n = std::min(kRows, end - i);
      ResolveRows(p, job.index, task / chunks * p.count + i, n, rows);
      for (int64_t k = 0; k < n; ++k) {
        if (rows[k] < 0) continue;
        f(static_cast<uint32_t>(rows[k]) / static_cast<uint32_t>(block),
          Pair{static_cast<uint32_t>(rows[k]), static_cast<uint32_t>(i + k)});
      }
    }
  };
  job.executor.ParallelFor(p.batch * chunks, [&](int64_t task) {
    uint32_t* const counts = at.get() + task * blocks;
    std::fill_n(counts, blocks, 0u);
    pairs_of(task, [&](uint32_t b, const Pair&) { ++counts[b]; });
  });
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    uint32_t* const counts = at.get() + batch * chunks * blocks;
    uint32_t total = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t c = 0; c < chunks; ++c) {
        const uint32_t n = counts[c * blocks + b];
        counts[c * blocks + b] = total;
        total += n;
      }
    }
    sorted->kept[batch] = total;
  }
  job.executor.ParallelFor(p.batch * chunks, [&](int64_t task) {
    Pair* const to = pairs.get() + task / chunks * p.count;
    uint32_t* const next = at.get() + task * blocks;
    pairs_of(task, [&](uint32_t b, const Pair& pair) { to[next[b]++] = pair; });
  });
  // Now a block ends where its last chunk does.
  const int64_t group = CeilDiv(blocks, 4 * job.executor.num_threads());
  const int64_t groups = CeilDiv(blocks, group);
  std::atomic<bool> ok = true;
  job.executor.ParallelFor(p.batch * groups, [&](int64_t task) {
    const int64_t batch = task / groups;
    const uint32_t* const ends = at.get() + ((batch + 1) * chunks - 1) * blocks;
    const auto starts = Scratch<uint32_t>(block + 1);
    if (starts == nullptr) {
      ok = false;
      return;
    }
    const int64_t first = task % groups * group;
    for (int64_t b = first; b < std::min(first + group, blocks); ++b) {
      const int64_t begin = b > 0 ? ends[b - 1] : 0;
      const int64_t row = b * block;
      SortBlock(pairs.get() + batch * p.count + begin, ends[b] - begin, row,
                std::min(block, p.extent - row), starts.get(),
                sorted->all.get() + batch * p.count + begin);
    }
  });
  return ok;
}

// Every row of y is written once, by the task that owns it; if y has been
// `started`, only those to which something is added.
Status AddByRow(const Job& job, bool started) {
  const IndexPlan& p = job.p;
  Pairs pairs;
  if (!SortPairs(job, &pairs)) return OutOfMemory();
  const int64_t row_bytes = p.inner_bytes();
  const int64_t slice = job.slice();
  const int64_t width = std::min(p.inner, kSums);
  const int64_t parts = CeilDiv(p.inner, width);  // of a row
  const bool zeroed = started && job.x == nullptr;
  const int64_t share = job.slices() * slice / (4 * job.executor.num_threads());
  const int64_t block = std::max<int64_t>(
      1, std::clamp(share, kTaskBytes / 16, zeroed ? kHugePage : kTaskBytes) /
             row_bytes);
  const int64_t blocks = CeilDiv(p.extent, block);
  const bool stream = !started && job.slices() * slice > StreamBytes() &&
                      row_bytes >= 4 * kLine;
  BlockFunction* copy = stream ? FunctionsOf().copy : nullptr;
  // Another thread takes longer to wake up than to write a few rows.
  const int64_t bytes = job.slices() * (p.extent + p.count) * row_bytes;
  const int64_t workers = bytes > kTaskBytes ? job.executor.num_threads() : 1;
  const auto add = [&](int64_t task, int64_t) {
    const int64_t part = task % parts;
    const int64_t first = task / parts % blocks * block;
    const int64_t end = std::min(first + block, p.extent);
    const int64_t outer = task / parts / blocks;
    const int64_t batch = outer / p.outer;
    const int64_t column = outer * slice + part * width * p.itemsize;
    RowSum sum = {};
    sum.source =
        job.source + outer * p.count * row_bytes + part * width * p.itemsize;
    sum.stride = row_bytes;
    sum.width = std::min(width, p.inner - part * width);
    sum.stream = copy;
    const Pair* pair = pairs.all.get() + batch * p.count;
    const Pair* const last = pair + pairs.kept[batch];
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
        job.Start(column + r * row_bytes, bytes);
      }
    };
    while (pair != last && pair->row < end) {
      pass(pair->row);
      row = pair->row;
      sum.pairs = pair;
      sum.num_ahead = last - pair;
      while (pair != last && pair->row == row) ++pair;
      sum.num_pairs = pair - sum.pairs;
      const int64_t at = column + row * row_bytes;
      sum.x = job.x != nullptr ? job.x + at : nullptr;
      sum.y = job.y + at;
      job.functions.sum_row(sum);
      ++row;
    }
    pass(end);
    if (stream) FenceStores();
  };
  job.executor.ParallelForWorkers(job.slices() * blocks * parts, workers, add);
  return Status::Ok();
}

// --- few

// In what y holds, by one thread, in a time that does not depend on how many
// rows it has. A hash table numbers those that are named.
Status AddFew(const Job& job) {
  constexpr int64_t kAhead = 8;  // rows of y
  const IndexPlan& p = job.p;
  const auto count = static_cast<uint64_t>(p.count);
  const int bits = std::bit_width(2 * count);
  const uint32_t mask = (uint32_t{1} << bits) - 1;
  const auto slots = Scratch<uint32_t>(int64_t{1} << bits);  // 1 + a number
  const auto named = Scratch<uint32_t>(p.count);             // its row
  const auto ends = Scratch<uint32_t>(p.count + 1);
  const auto given = Scratch<Pair>(p.count), pairs = Scratch<Pair>(p.count);
  if (!slots || !named || !ends || !given || !pairs) return OutOfMemory();
  const int64_t row_bytes = p.inner_bytes();
  const int64_t width = std::min(p.inner, kSums);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    std::fill_n(slots.get(), mask + 1, 0u);
    uint32_t numbers = 0, kept = 0;
    ends[0] = 0;
    int64_t rows[kRows];
    for (int64_t first = 0; first < p.count; first += kRows) {
      const int64_t n = std::min(kRows, p.count - first);
      ResolveRows(p, job.index, batch * p.count + first, n, rows);
      for (int64_t k = 0; k < n; ++k) {
        if (rows[k] < 0) continue;
        const auto row = static_cast<uint32_t>(rows[k]);
        constexpr uint32_t kFibonacci = 0x9e3779b9;
        uint32_t at = (row * kFibonacci) >> (32 - bits);
        while (slots[at] != 0 && named[slots[at] - 1] != row) {
          at = (at + 1) & mask;
        }
        if (slots[at] == 0) {
          named[numbers] = row;
          slots[at] = ++numbers;
          ends[numbers] = 0;
        }
        ++ends[slots[at]];
        given[kept++] = {slots[at] - 1, static_cast<uint32_t>(first + k)};
      }
    }
    for (uint32_t r = 0; r < numbers; ++r) ends[r + 1] += ends[r];
    for (uint32_t i = 0; i < kept; ++i) {
      pairs[ends[given[i].row]++] = {named[given[i].row], given[i].source};
    }
    for (int64_t outer = batch * p.outer; outer < (batch + 1) * p.outer;
         ++outer) {
      char* const y = job.y + outer * job.slice();
      for (int64_t column = 0; column < p.inner; column += width) {
        const int64_t offset = column * p.itemsize;
        RowSum sum = {};
        sum.source = job.source + outer * p.count * row_bytes + offset;
        sum.stride = row_bytes;
        sum.width = std::min(width, p.inner - column);
        const int64_t bytes = sum.width * p.itemsize;
        for (uint32_t r = 0, begin = 0; r < numbers; begin = ends[r++]) {
          const int64_t soon = std::min<int64_t>(r + kAhead, numbers - 1);
          for (int64_t k = 0; k < bytes; k += kLine) {
            __builtin_prefetch(y + named[soon] * row_bytes + offset + k, 1);
          }
          sum.pairs = pairs.get() + begin;
          sum.num_pairs = ends[r] - begin;
          sum.num_ahead = kept - begin;
          sum.y = y + named[r] * row_bytes + offset;
          sum.x = sum.y;
          job.functions.sum_row(sum);
        }
      }
    }
  }
  return Status::Ok();
}

// --- in order

// A task owns some slices of y, or a part of the columns of one.
Status AddInOrder(const Job& job, bool started) {
  const IndexPlan& p = job.p;
  const int64_t row_bytes = p.inner_bytes();
  const int64_t slice = job.slice();
  if (!started) {
    const int64_t size = job.slices() * slice;
    job.executor.ParallelFor(CeilDiv(size, kTaskBytes), [&](int64_t task) {
      const int64_t from = task * kTaskBytes;
      job.Start(from, std::min(kTaskBytes, size - from));
    });
  }
  // Another thread takes longer to wake up than to add a few rows.
  const int64_t added = job.slices() * p.count * row_bytes;
  const int64_t wanted =  // tasks
      std::clamp<int64_t>(added / kTaskBytes, 1,
                          2 * job.executor.num_threads());
  const int64_t together =
      std::clamp<int64_t>(kTaskBytes / slice, 1, CeilDiv(p.outer, wanted));
  const int64_t groups = CeilDiv(p.outer, together);
  const int64_t lines = CeilDiv(row_bytes, 2 * kLine);
  const int64_t width =  // whole lines, and the one that a neighbour fetches
      CeilDiv(lines, CeilDiv(wanted, p.batch * groups)) * 2 * kLine /
      p.itemsize;
  const int64_t parts = CeilDiv(p.inner, width);
  job.executor.ParallelFor(p.batch * groups * parts, [&](int64_t task) {
    const int64_t column = task % parts * width;
    const int64_t group = task / parts % groups;
    const int64_t batch = task / parts / groups;
    const int64_t begin = group * together;
    const int64_t end = std::min(begin + together, p.outer);
    int64_t rows[kRows];
    for (int64_t first = 0; first < p.count; first += kRows) {
      const int64_t n = std::min(kRows, p.count - first);
      ResolveRows(p, job.index, batch * p.count + first, n, rows);
      for (int64_t o = batch * p.outer + begin; o < batch * p.outer + end;
           ++o) {
        const int64_t offset = column * p.itemsize;
        job.functions.add_rows(
            job.source + (o * p.count + first) * row_bytes + offset, rows, n,
            std::min(width, p.inner - column), p.inner,
            job.y + o * slice + offset);
      }
    }
  });
  return Status::Ok();
}

}  // namespace

Status IndexReduce(const IndexPlan& plan, Reduction reduction, SumType type,
                   const void* index, const void* source, const void* x,
                   void* y, const Executor& executor) {
  const Job job = {plan,
                   RowFunctionsOf(reduction, type),
                   reduction == Reduction::kSum,
                   index,
                   static_cast<const char*>(source),
                   static_cast<const char*>(x),
                   static_cast<char*>(y),
                   executor};
  const int64_t num_parts = NumParts(job);
  if (num_parts > 1 || AreSumsCheap(job)) return AddInParts(job, num_parts);
  const bool in_place = x == y;
  const int64_t size = job.slices() * job.slice();
  const bool zeroed = x == nullptr && job.zero && ZeroPages(job.y, size);
  const bool started = in_place || zeroed;  // y holds what is added to
  const bool many = job.slices() >= 2 * executor.num_threads();
  // y holds the sums themselves only where they are no wider.
  const bool is_short =
      plan.inner_bytes() < (size < kCached ? kLongRow : kShortRow);
  const bool in_order = job.functions.sum_bytes == plan.itemsize &&
                        (in_place || many || is_short);
  const int64_t added = job.slices() * plan.count * plan.inner_bytes();
  if (in_place && !in_order && added <= kTaskBytes / 2) return AddFew(job);
  // Row by row, whose thread is the first to write to a page makes it.
  if (!in_place && (in_order || !zeroed)) TouchPages(job.y, size, executor);
  return in_order ? AddInOrder(job, started) : AddByRow(job, started);
}

}  // namespace jax_layout
