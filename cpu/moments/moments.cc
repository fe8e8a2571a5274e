// SPDX-License-Identifier: Apache-2.0
//
// Rows that fit into a cache are read twice, which is exact and costs no memory
// traffic. Of the rest each element is read once. Squares are taken about the
// mean of the blocks before, of the first block about that of its head, and
// blocks are joined in float64 (Chan, Golub and LeVeque, 1983). Nothing
// cancels, whatever the mean is: a block is many of its deviations away from
// what came before only where the variance of both together is as large.
#include "cpu/moments/moments.h"

#include <algorithm>
#include <array>
#include <memory>
#include <new>

#include "core/arithmetic.h"
#include "cpu/ahead.h"
#include "cpu/clones.h"
#include "cpu/elements.h"
#include "cpu/moments/runs.h"

namespace jax_layout {
namespace {

constexpr int64_t kWidth = 256;       // of a row of accumulators
constexpr int64_t kBlock = 16 << 10;  // elements
constexpr int64_t kRuns = 64;         // of a block
// Of the first block so many elements, and such a part, tell where the mean is:
// no further away than a block is from those before it.
constexpr int64_t kHead = 64, kHeadShare = 16;
constexpr int64_t kTaskElements = 32 << 10;
// Short rows whose means are taken before what is about them, which otherwise
// waits for each; as many elements stay in L1.
constexpr int64_t kRowsTogether = 8, kNear = 1 << 10;

// What is summed at a time: of rows of `pitch` elements the first `columns`, or
// all. Several rows, `folded`, are then one row of `width` accumulators.
struct Block {
  const Run* runs;
  int64_t count, columns, pitch, folded;
  int64_t width() const { return folded * columns; }
};

// Calls fn(offset, rows, width) for rows of accumulators in each run.
template <typename Fn>
JAX_LAYOUT_INLINE void ForEachRows(const Block& block, const Fn& fn) {
  const int64_t width = block.width(), pitch = block.folded * block.pitch;
  for (int64_t i = 0; i < block.count; ++i) {
    const Run& run = block.runs[i];
    const int64_t wide = block.folded == 1 ? run.rows : run.rows / block.folded;
    const int64_t rest = (run.rows - wide * block.folded) * block.columns;
    fn(run.offset, wide, width, pitch);
    if (rest > 0) fn(run.offset + wide * pitch, int64_t{1}, rest, pitch);
  }
}

// The sum of the rows that are one row of accumulators, which are lost.
template <typename Sum>
JAX_LAYOUT_INLINE void Fold(const Block& block, Sum* sum, double* folded) {
  for (int64_t rows = block.folded; rows > 1;) {
    const int64_t half = (rows + 1) / 2;
    const Sum* rest = sum + half * block.columns;
    const int64_t count = (rows - half) * block.columns;
    for (int64_t j = 0; j < count; ++j) sum[j] += rest[j];
    rows = half;
  }
  for (int64_t j = 0; j < block.columns; ++j) folded[j] = sum[j];
}

// Calls fn(j) for j in [0, width), and meanwhile asks memory for kRows rows
// from each of `soon` on.
template <int kRows, typename Stored, typename Fn, size_t kArrays>
JAX_LAYOUT_INLINE void ForEachColumn(int64_t width, int64_t pitch, const Fn& fn,
                                     const Stored* const (&soon)[kArrays]) {
  constexpr int64_t kLine = 64 / sizeof(Stored);
  const int64_t lines = width / kLine;
  const int64_t jump = (pitch - lines * kLine) * sizeof(Stored);
  Ahead ahead[kArrays];
  for (size_t k = 0; k < kArrays; ++k) {
    ahead[k] = {reinterpret_cast<const char*>(soon[k]), lines, lines, jump};
  }
  int64_t j = 0;
  for (; j + kLine <= width; j += kLine) {
    for (Ahead& next : ahead) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) next.Next();
    }
    for (int64_t l = j; l < j + kLine; ++l) fn(l);
  }
  for (; j < width; ++j) fn(j);
}

// sums[j] = the sum of x[i, j]
template <typename T>
JAX_LAYOUT_INLINE void Sum(const Block& block, const typename T::Stored* data,
                           double* sums) {
  alignas(64) typename T::Sum sum[kWidth];
  std::fill_n(sum, block.width(), 0);
  ForEachRows(block, [&](int64_t offset, int64_t rows, int64_t width,
                         int64_t pitch) JAX_LAYOUT_LAMBDA {
    const typename T::Stored* x = data + offset;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4, x += 4 * pitch) {
      for (int64_t j = 0; j < width; ++j) {
        sum[j] += (T::Load(x[j]) + T::Load(x[j + pitch])) +
                  (T::Load(x[j + 2 * pitch]) + T::Load(x[j + 3 * pitch]));
      }
    }
    for (; i < rows; ++i, x += pitch) {
      for (int64_t j = 0; j < width; ++j) sum[j] += T::Load(x[j]);
    }
  });
  Fold(block, sum, sums);
}

// With d = x[i, j] - center[j]: sums[j] = the sum of d, squares[j] that of d *
// d.
template <typename T>
JAX_LAYOUT_INLINE void Squares(const Block& block,
                               const typename T::Stored* data,
                               const typename T::Sum* center, double* sums,
                               double* squares) {
  alignas(64) typename T::Sum sum[kWidth], square[kWidth];
  std::fill_n(sum, block.width(), 0);
  std::fill_n(square, block.width(), 0);
  ForEachRows(block, [&](int64_t offset, int64_t rows, int64_t width,
                         int64_t pitch) JAX_LAYOUT_LAMBDA {
    const typename T::Stored* x = data + offset;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4, x += 4 * pitch) {
      const auto add = [&](int64_t j) JAX_LAYOUT_LAMBDA {
        const auto a = T::Load(x[j]) - center[j];
        const auto b = T::Load(x[j + pitch]) - center[j];
        const auto c = T::Load(x[j + 2 * pitch]) - center[j];
        const auto d = T::Load(x[j + 3 * pitch]) - center[j];
        sum[j] += (a + b) + (c + d);
        square[j] += (a * a + b * b) + (c * c + d * d);
      };
      ForEachColumn<4>(width, pitch, add, {x + 8 * pitch});
    }
    for (; i < rows; ++i, x += pitch) {
      for (int64_t j = 0; j < width; ++j) {
        const auto d = T::Load(x[j]) - center[j];
        sum[j] += d;
        square[j] += d * d;
      }
    }
  });
  Fold(block, sum, sums);
  Fold(block, square, squares);
}

// sums[j] = the sum of ct[i, j], products[j] that of
// ct[i, j] * (x[i, j] - center[j])
template <typename T>
JAX_LAYOUT_INLINE void Products(const Block& block,
                                const typename T::Stored* left,
                                const typename T::Stored* right,
                                const typename T::Sum* center, double* sums,
                                double* products) {
  alignas(64) typename T::Sum sum[kWidth], product[kWidth];
  std::fill_n(sum, block.width(), 0);
  std::fill_n(product, block.width(), 0);
  ForEachRows(block, [&](int64_t offset, int64_t rows, int64_t width,
                         int64_t pitch) JAX_LAYOUT_LAMBDA {
    const typename T::Stored *ct = left + offset, *x = right + offset;
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2, ct += 2 * pitch, x += 2 * pitch) {
      const auto add = [&](int64_t j) JAX_LAYOUT_LAMBDA {
        const auto a = T::Load(ct[j]), b = T::Load(ct[j + pitch]);
        sum[j] += a + b;
        product[j] += a * (T::Load(x[j]) - center[j]) +
                      b * (T::Load(x[j + pitch]) - center[j]);
      };
      ForEachColumn<2>(width, pitch, add, {ct + 4 * pitch, x + 4 * pitch});
    }
    for (; i < rows; ++i, ct += pitch, x += pitch) {
      for (int64_t j = 0; j < width; ++j) {
        sum[j] += T::Load(ct[j]);
        product[j] += T::Load(ct[j]) * (T::Load(x[j]) - center[j]);
      }
    }
  });
  Fold(block, sum, sums);
  Fold(block, product, products);
}

// Two numbers of a result, of the elements of a part.
struct Pair {
  double first, second;
};

// The elements that a task sums: of a group (b, k) the columns [column, column
// + columns) of the rows [begin, end), counted over r and s.
struct Part {
  int64_t group, column, columns, begin, end;
};

// Calls fn(block, rows) for blocks of a part.
template <typename Fn>
JAX_LAYOUT_INLINE void ForEachBlock(const MomentsProblem& p, const Part& part,
                                    const Fn& fn) {
  const int64_t most = std::max<int64_t>(kBlock / part.columns, 1);
  Run runs[kRuns];
  Block block = {runs, 0, part.columns, p.l, 1};
  if (part.columns == p.l) {
    // Few elements are not worth many sums, which are added up in the end.
    const int64_t width = p.s * p.l < 32 * kWidth ? kWidth / 4 : kWidth;
    block.folded = std::max<int64_t>(width / p.l, 1);
  }
  const int64_t first = part.group / p.k * p.r * p.k + part.group % p.k;
  int64_t outer = part.begin / p.s, inner = part.begin % p.s, rows = 0;
  for (int64_t i = part.begin; i < part.end;) {
    const int64_t step = std::min({p.s - inner, part.end - i, most - rows});
    const int64_t at = (first + outer * p.k) * p.s;
    runs[block.count++] = {(at + inner) * p.l + part.column, step};
    rows += step;
    i += step;
    inner += step;
    if (inner == p.s) {
      inner = 0;
      ++outer;
    }
    if (rows == most || block.count == kRuns || i == part.end) {
      fn(block, rows);
      block.count = rows = 0;
    }
  }
}

// center[j], for as many rows of columns as one row of accumulators has.
template <typename Sum>
JAX_LAYOUT_INLINE void Repeat(const Block& block, Sum* center) {
  if (block.columns == 1) {  // not each from the one before
    std::fill_n(center + 1, block.width() - 1, *center);
    return;
  }
  for (int64_t j = block.columns; j < block.width(); ++j) {
    center[j] = center[j - block.columns];
  }
}

// Joins means, and sums of squares about them, of na elements with those of nb.
JAX_LAYOUT_INLINE void Join(Pair* a, int64_t na, const Pair* b, int64_t nb,
                            int64_t columns) {
  const double share = static_cast<double>(nb) / static_cast<double>(na + nb);
  const double both = share * static_cast<double>(na);
  for (int64_t j = 0; j < columns; ++j) {
    const double apart = b[j].first - a[j].first;
    a[j].first += apart * share;
    a[j].second += b[j].second + apart * apart * both;
  }
}

// out[j]: mean, and sum of squares about it.
template <typename T, int kBytes>
JAX_LAYOUT_INLINE void MomentsOf(const MomentsProblem& p, const Part& part,
                                 const void* data, Pair* out) {
  const auto* x = static_cast<const typename T::Stored*>(data);
  alignas(64) typename T::Sum center[kWidth];
  double sums[kWidth], squares[kWidth];
  Pair here[kWidth];
  int64_t before = 0;
  ForEachBlock(
      p, part, [&](const Block& block, int64_t rows) JAX_LAYOUT_LAMBDA {
        if (before == 0) {
          const int64_t few = CeilDiv(kHead, part.columns);
          const Run run = {
              block.runs->offset,
              std::min(block.runs->rows, std::max(few, rows / kHeadShare))};
          const Block head = {&run, 1, block.columns, block.pitch,
                              block.folded};
          Sum<T>(head, x, sums);
          for (int64_t j = 0; j < part.columns; ++j) {
            const double mean = sums[j] / static_cast<double>(run.rows);
            center[j] = static_cast<typename T::Sum>(mean);
          }
        } else {
          for (int64_t j = 0; j < part.columns; ++j) {
            center[j] = static_cast<typename T::Sum>(out[j].first);
          }
        }
        const double inverse = 1 / static_cast<double>(rows);
        if (p.l == 1 && kSumsRuns<T>) {
          if constexpr (kSumsRuns<T>) {
            SumRuns<T, kBytes>(block.runs, block.count,
                               Deviations<T>(x, *center), sums, squares);
          }
        } else {
          Repeat(block, center);
          Squares<T>(block, x, center, sums, squares);
        }
        Pair* to = before == 0 ? out : here;
        for (int64_t j = 0; j < part.columns; ++j) {
          const double off = sums[j] * inverse;
          to[j] = {center[j] + off, squares[j] - sums[j] * off};
        }
        if (before > 0) Join(out, before, here, rows, part.columns);
        before += rows;
      });
}

// out[j]: sum, and sum of products.
template <typename T, int kBytes>
JAX_LAYOUT_INLINE void SumsOf(const MomentsProblem& p, const Part& part,
                              const void* left, const void* right,
                              const void* about, Pair* out) {
  const auto* ct = static_cast<const typename T::Stored*>(left);
  const auto* x = static_cast<const typename T::Stored*>(right);
  alignas(64) typename T::Sum center[kWidth];
  double sums[kWidth], products[kWidth];
  std::copy_n(static_cast<const typename T::Sum*>(about) + part.group * p.l +
                  part.column,
              part.columns, center);
  std::fill_n(out, part.columns, Pair{0, 0});
  ForEachBlock(p, part, [&](const Block& block, int64_t) JAX_LAYOUT_LAMBDA {
    if (p.l == 1 && kSumsRuns<T>) {
      if constexpr (kSumsRuns<T>) {
        SumRuns<T, kBytes>(block.runs, block.count,
                           CenteredProducts<T>(ct, x, *center), sums, products);
      }
    } else {
      Repeat(block, center);
      Products<T>(block, ct, x, center, sums, products);
    }
    for (int64_t j = 0; j < part.columns; ++j) {
      out[j].first += sums[j];
      out[j].second += products[j];
    }
  });
}

// mean[i] and variance[i] of the rows i of [begin, end), which have n elements
// and are read twice: from memory, and while they are in a cache.
template <typename T, int kBytes>
JAX_LAYOUT_INLINE void MomentsOfRows(int64_t n, int64_t begin, int64_t end,
                                     const void* data, void* means,
                                     void* variances) {
  using Sum = typename T::Sum;
  const auto* x = static_cast<const typename T::Stored*>(data);
  auto *mean = static_cast<Sum*>(means),
       *variance = static_cast<Sum*>(variances);
  const double inverse = 1 / static_cast<double>(n);
  const int64_t most = std::clamp<int64_t>(kNear / n, 1, kRowsTogether);
  for (int64_t first = begin; first < end; first += most) {
    const int64_t rows = std::min(most, end - first);
    Sum center[kRowsTogether];
    double sum, square;
    for (int64_t i = 0; i < rows; ++i) {
      const Run run = {(first + i) * n, n};
      SumRuns<T, kBytes>(&run, 1, Elements<T>(x), &sum, &square);
      center[i] = static_cast<Sum>(sum * inverse);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const Run run = {(first + i) * n, n};
      SumRuns<T, kBytes>(&run, 1, Deviations<T>(x, center[i]), &sum, &square);
      const double off = sum * inverse;
      mean[first + i] = static_cast<Sum>(center[i] + off);
      variance[first + i] = static_cast<Sum>((square - sum * off) * inverse);
    }
  }
}

// Likewise sum[i] and product[i] of CenteredSums.
template <typename T, int kBytes>
JAX_LAYOUT_INLINE void SumsOfRows(int64_t n, int64_t begin, int64_t end,
                                  const void* left, const void* right,
                                  const void* about, void* sums,
                                  void* products) {
  using Sum = typename T::Sum;
  const auto* ct = static_cast<const typename T::Stored*>(left);
  const auto* x = static_cast<const typename T::Stored*>(right);
  const auto* center = static_cast<const Sum*>(about);
  for (int64_t i = begin; i < end; ++i) {
    const Run run = {i * n, n};
    double sum, product;
    SumRuns<T, kBytes>(&run, 1, CenteredProducts<T>(ct, x, center[i]), &sum,
                       &product);
    static_cast<Sum*>(sums)[i] = static_cast<Sum>(sum);
    static_cast<Sum*>(products)[i] = static_cast<Sum>(product);
  }
}

// The loops of one level for a type; those of rows may be missing.
struct MomentsFunctions {
  decltype(&MomentsOf<Bf16, 32>) moments;
  decltype(&SumsOf<Bf16, 32>) sums;
  decltype(&MomentsOfRows<Bf16, 32>) moments_of_rows;
  decltype(&SumsOfRows<Bf16, 32>) sums_of_rows;
};
// And for all, as Dispatch() numbers them.
template <Isa isa>
constexpr int kRegBytes = isa == Isa::kAvx512 ? 64 : 32;
template <Isa isa, typename T>
constexpr MomentsFunctions LoopsOf() {
  constexpr int kBytes = kRegBytes<isa>;
  MomentsFunctions loops = {kCompiled<isa, MomentsOf<T, kBytes>>,
                            kCompiled<isa, SumsOf<T, kBytes>>, nullptr,
                            nullptr};
  if constexpr (kSumsRuns<T>) {
    loops.moments_of_rows = kCompiled<isa, MomentsOfRows<T, kBytes>>;
    loops.sums_of_rows = kCompiled<isa, SumsOfRows<T, kBytes>>;
  }
  return loops;
}
template <Isa isa, typename... T>
constexpr std::array<MomentsFunctions, sizeof...(T)> kLoops = {
    LoopsOf<isa, T>()...};
template <Isa isa>
constexpr const auto* kFunctions =
    kLoops<isa, Plain<float>, Plain<double>, Bf16, F16>.data();

const Kernels<const MomentsFunctions*> kKernels(
    "moments", {
#ifdef __x86_64__
                   {Isa::kAvx512, kFunctions<Isa::kAvx512>},
                   {Isa::kAvx2, kFunctions<Isa::kAvx2>},
#endif
                   {Isa::kPortable, kFunctions<Isa::kPortable>}});

// So many tasks that threads which start late find some, if they are not too
// small.
int64_t TasksOf(int64_t elements, const Executor& executor) {
  return std::clamp<int64_t>(elements / kTaskElements, 1,
                             4 * executor.num_threads());
}

// Cuts the work into tasks, each of a group's columns and rows, calls
// `sum(part, pairs)` for each, joins what belongs together and stores it.
template <typename Sum, typename SumPart, typename JoinPairs>
Status SumParts(const MomentsProblem& p, double scale, Sum* first, Sum* second,
                const Executor& executor, const SumPart& sum,
                const JoinPairs& join) {
  const int64_t groups = p.b * p.k, rows = p.r * p.s;
  const int64_t columns = std::min(p.l, kWidth);
  const int64_t tiles = (p.l + columns - 1) / columns;
  const int64_t whole = groups * tiles;  // tasks, if rows are not cut
  const int64_t elements = groups * rows * p.l;
  const int64_t wanted = TasksOf(elements, executor);
  const int64_t cuts = std::clamp<int64_t>(wanted / whole, 1, rows);
  const int64_t together = std::max<int64_t>(whole * cuts / wanted, 1);
  const int64_t parts = whole * cuts;
  std::unique_ptr<Pair[]> pairs(new (std::nothrow) Pair[cuts * groups * p.l]);
  if (pairs == nullptr) return Status::Error("moments: out of memory.");
  const auto part_of = [&](int64_t i) {
    const int64_t cut = i % cuts, tile = i / cuts % tiles;
    const int64_t column = tile * columns;
    return Part{i / cuts / tiles, column, std::min(columns, p.l - column),
                cut * rows / cuts, (cut + 1) * rows / cuts};
  };
  const auto pairs_of = [&](const Part& part, int64_t cut) {
    return pairs.get() + (cut * groups + part.group) * p.l + part.column;
  };
  executor.ParallelForParts(parts, together, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const Part part = part_of(i);
      sum(part, pairs_of(part, i % cuts));
    }
  });
  for (int64_t i = 0; i < whole; ++i) {
    const Part part = part_of(i * cuts);
    Pair* all = pairs_of(part, 0);
    for (int64_t cut = 1; cut < cuts; ++cut) {
      const int64_t before = cut * rows / cuts;
      join(all, before, pairs_of(part, cut), (cut + 1) * rows / cuts - before,
           part.columns);
    }
    const int64_t at = part.group * p.l + part.column;
    for (int64_t j = 0; j < part.columns; ++j) {
      first[at + j] = static_cast<Sum>(all[j].first);
      second[at + j] = static_cast<Sum>(all[j].second * scale);
    }
  }
  return Status::Ok();
}

// Whether a problem is one of rows that fit into a cache: too short to be cut.
bool AreRows(const MomentsProblem& p) {
  return p.k == 1 && p.l == 1 && p.r * p.s <= kBlock;
}

// Calls fn(begin, end) for parts of b rows of n elements.
template <typename Fn>
Status ForEachRowsPart(const MomentsProblem& p, const Executor& executor,
                       const Fn& fn) {
  executor.ParallelForParts(
      p.b, CeilDiv(p.b, TasksOf(p.b * p.r * p.s, executor)), fn);
  return Status::Ok();
}

// Calls fn with the loops of a type, and a value of the type of its sums.
template <typename Fn>
Status Dispatch(DType type, const Fn& fn) {
  const MomentsFunctions* functions = kKernels.Take();
  switch (type) {
    case DType::kF32:
      return fn(functions[0], float{});
    case DType::kF64:
      return fn(functions[1], double{});
    case DType::kBF16:
      return fn(functions[2], float{});
    case DType::kF16:
      return fn(functions[3], float{});
    default:
      return Status::Error("moments: x must be of a floating dtype.");
  }
}

}  // namespace

Status Moments(const MomentsProblem& problem, const void* x, void* mean,
               void* variance, const Executor& executor) {
  return Dispatch(problem.type, [&](const MomentsFunctions& loops, auto zero) {
    using Sum = decltype(zero);
    if (AreRows(problem) && loops.moments_of_rows != nullptr) {
      return ForEachRowsPart(
          problem, executor, [&](int64_t begin, int64_t end) {
            loops.moments_of_rows(problem.r * problem.s, begin, end, x, mean,
                                  variance);
          });
    }
    return SumParts(
        problem, 1.0 / static_cast<double>(problem.r * problem.s),
        static_cast<Sum*>(mean), static_cast<Sum*>(variance), executor,
        [&](const Part& part, Pair* out) {
          loops.moments(problem, part, x, out);
        },
        [](Pair* a, int64_t na, const Pair* b, int64_t nb, int64_t columns) {
          Join(a, na, b, nb, columns);
        });
  });
}

Status CenteredSums(const MomentsProblem& problem, const void* ct,
                    const void* x, const void* center, void* sum, void* product,
                    const Executor& executor) {
  return Dispatch(problem.type, [&](const MomentsFunctions& loops, auto zero) {
    using Sum = decltype(zero);
    if (AreRows(problem) && loops.sums_of_rows != nullptr) {
      return ForEachRowsPart(
          problem, executor, [&](int64_t begin, int64_t end) {
            loops.sums_of_rows(problem.r * problem.s, begin, end, ct, x, center,
                               sum, product);
          });
    }
    return SumParts(
        problem, 1.0, static_cast<Sum*>(sum), static_cast<Sum*>(product),
        executor,
        [&](const Part& part, Pair* out) {
          loops.sums(problem, part, ct, x, center, out);
        },
        [](Pair* a, int64_t, const Pair* b, int64_t, int64_t columns) {
          for (int64_t j = 0; j < columns; ++j) {
            a[j].first += b[j].first;
            a[j].second += b[j].second;
          }
        });
  });
}

}  // namespace jax_layout
