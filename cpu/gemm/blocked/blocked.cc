// SPDX-License-Identifier: Apache-2.0
//
// From a problem to panels of b times rows of a (see kernels.h), in tasks.
#include "cpu/gemm/blocked/blocked.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/caches.h"
#include "cpu/gemm/blocked/kernels.h"
#include "cpu/gemm/finish.h"
#include "cpu/scratch.h"

namespace jax_layout {
namespace {

// Multiply-adds worth handing to another thread, about 8 microseconds.
constexpr int64_t kTaskWork = 512 << 10;
// A few tasks per thread even out what else the machine does.
constexpr int64_t kTasksPerThread = 4;
// Of packed b at a time.
constexpr int64_t kPackedBytes = 8 << 20;
// Panels that are packed together: longer pieces of rows are read.
constexpr int64_t kGroup = 4;
// Panels of b that are deeper than what fits in L1 come from L2 as fast as
// tiles multiply; the fewer, the less often sums are stored and added to.
constexpr int64_t kMostDeep = 512;
// Up to so many tiles of rows, threads take columns of b in turn, if each has
// so many turns.
constexpr int64_t kTurnTiles = 24, kTurns = 3;
// Operands of so many bytes are read where they are: packing would cost more
// than what it saves.
constexpr int64_t kDirectBytes = 64 << 10;

const Kernels<const BlockedKernels*> kKernels("blocked",
                                              {
#ifdef __x86_64__
                                                  {Isa::kAvx512,
                                                   &kBlockedAvx512},
                                                  {Isa::kAvx2, &kBlockedAvx2},
#elif defined(__aarch64__)
                                                  {Isa::kNeon, &kBlockedNeon},
#endif
                                              });
// Of bf16 two at a time.
const Kernels<const BlockedKernels*> kPairs("blocked pairs",
                                            {
#ifdef __x86_64__
                                                {Isa::kAvx512Bf16,
                                                 &kBlockedAvx512Bf16},
#endif
                                            });

// How y is cut, and what is packed.
struct Blocks {
  int64_t k_block;
  int64_t rows;          // whose packed panels are in L2
  int64_t chunk_cols;    // of b that are packed at a time
  int64_t down, across;  // units of a chunk
  bool a_direct, b_direct;
  bool shared;  // b is packed for all units of a chunk
  // So many columns of b are a thread's turn: it packs them, multiplies them by
  // all rows and takes the next. 0 where rows are divided.
  int64_t turn_cols;
};

Blocks ChooseBlocks(const GemmProblem& problem, const BlockedKernels& kernels,
                    int64_t k, int64_t threads) {
  const GemmPlan& plan = problem.plan;
  const bool f32 = problem.operands == DType::kF32;
  const int64_t steps = plan.Steps(), deep = std::max<int64_t>(1, k);
  Blocks b = {};
  b.k_block = CeilDiv(deep, CeilDiv(deep, kMostDeep));
  b.rows = std::max(CachesOfCore().l2 / 2 / (deep * 4), 4 * kernels.rows);
  b.a_direct = f32 && plan.n <= 4 * kernels.cols &&
               (plan.a.transposed ? k : plan.m) * plan.a.ld * 4 <= kDirectBytes;
  b.b_direct =
      k == 0 ||
      (f32 && !plan.b.transposed &&
       (kernels.masks || plan.n % kernels.lanes == 0) &&
       (k * plan.b.ld * 4 <= kDirectBytes || plan.m <= 2 * kernels.rows));
  if (!b.a_direct && !b.b_direct && steps == 1 &&
      plan.m <= kTurnTiles * kernels.rows) {
    const int64_t panels = std::clamp<int64_t>(
        CachesOfCore().l2 / 2 / (deep * 4 * kernels.cols), kGroup / 2, kGroup);
    const int64_t cols = panels * kernels.cols;
    if (CeilDiv(plan.n, cols) >= kTurns * threads) {
      b.turn_cols = cols;
      return b;
    }
  }
  b.chunk_cols = plan.n;
  if (!b.b_direct) {
    const int64_t group = kGroup * kernels.cols;
    const int64_t most =
        std::max<int64_t>(1, kPackedBytes / (deep * 4) / group) * group;
    b.chunk_cols = RoundUp(CeilDiv(plan.n, CeilDiv(plan.n, most)), group);
    b.chunk_cols = std::min(b.chunk_cols, plan.n);
  }
  const int64_t work = plan.m * b.chunk_cols * std::max<int64_t>(32, k);
  const int64_t wanted =
      CeilDiv(std::min(threads * kTasksPerThread,
                       std::max<int64_t>(1, work * steps / kTaskWork)),
              steps);
  b.down = std::clamp<int64_t>(plan.m / (4 * kernels.rows), 1, wanted);
  b.across = 1;
  if (b.down < std::min(wanted, 2 * threads)) {
    b.across = std::clamp<int64_t>(b.chunk_cols / (kGroup * kernels.cols), 1,
                                   CeilDiv(wanted, b.down));
  }
  if (steps == 1) {
    b.down = std::max(b.down, CeilDiv(plan.m, b.rows));
    if (b.down > threads) b.down = std::min(RoundUp(b.down, threads), plan.m);
  }
  b.shared = !b.b_direct && b.down > 1;
  return b;
}

// Which groups of packed panels are there. Whoever needs one first packs it.
class Groups {
 public:
  explicit Groups(int64_t count)
      : states_(std::make_unique<std::atomic<int>[]>(count)) {}

  // Whether the group is there, which `make` may see to. Another thread may be
  // at it; that is waited for if `wait`.
  template <class Make>
  bool Has(int64_t group, bool wait, const Make& make) {
    std::atomic<int>& state = states_[group];
    int found = state.load(std::memory_order_acquire);
    if (found == kAbsent && state.compare_exchange_strong(found, kBusy)) {
      make();
      state.store(kReady, std::memory_order_release);
      return true;
    }
    for (int i = 0; found != kReady && wait; ++i) {
      i < 1000 ? internal::Pause() : std::this_thread::yield();
      found = state.load(std::memory_order_acquire);
    }
    return found == kReady;
  }

 private:
  enum { kAbsent, kBusy, kReady };
  std::unique_ptr<std::atomic<int>[]> states_;
};

class Product {
 public:
  Product(const GemmProblem& problem, const GemmBuffers& buffers,
          const Executor& executor, const BlockedKernels& kernels)
      : problem_(problem),
        plan_(problem.plan),
        buffers_(buffers),
        executor_(executor),
        kernels_(kernels),
        // Without alpha the operands are not read.
        summed_(problem.alpha == 0. ? 0 : plan_.k),
        k_(CeilDiv(summed_, kernels.depth)),
        in_(ItemSize(problem.operands)),
        out_(ItemSize(problem.result)),
        blocks_(ChooseBlocks(problem, kernels, k_, executor.num_threads())),
        a_panel_(RoundUp(
            k_ * RoundUp(kernels.rows, kernels.lanes) + kernels.lanes, 16)),
        steps_(plan_.Steps()) {
    GemmEpilogue& e = panel_.epilogue;
    e.alpha = static_cast<float>(problem.alpha.real());
    e.beta = static_cast<float>(problem.beta.real());
    e.result = problem.result;
    e.activation = problem.activation;
    e.derivative = problem.derivative;
    e.write_aux = problem.aux;
    panel_.plain = problem.result == DType::kF32 && e.alpha == 1 &&
                   e.beta == 0 && !problem.bias && !problem.aux &&
                   e.activation == Activation::kNone &&
                   e.derivative == Activation::kNone;
    panel_.k = k_;
    panel_.k_block = blocks_.k_block;
    panel_.ld = plan_.y.ld;
    panel_.a_packed = !blocks_.a_direct;
    panel_.b_packed = !blocks_.b_direct;
    panel_.a_panel = a_panel_;
    panel_.a_row = plan_.a.transposed ? 1 : plan_.a.ld;
    panel_.a_k = plan_.a.transposed ? plan_.a.ld : 1;
    panel_.b_k = blocks_.b_direct ? plan_.b.ld : kernels.cols;
  }

  Status Run();

 private:
  // What a step of the loops, and a unit of it, work on.
  struct Operands {
    const char *a, *b, *bias;
    char *y, *aux;
  };
  struct Unit {
    Operands at;
    int64_t row, rows;
    int64_t col, cols;  // of the chunk
    int64_t first;      // panel, of those of the unit
    float* b;           // packed, or where it is to be
    Groups* groups;     // null if b is the unit's own
  };

  Operands Step(int64_t step) const;
  void PackA(const Operands& at, int64_t row, int64_t rows, float* to) const;
  void PackB(const Operands& at, int64_t col, int64_t cols, float* to) const;
  BlockedAhead Ahead(const Operands& at, int64_t col, int64_t cols) const;
  // The panel that follows the one at column j, if it was packed with it.
  BlockedAhead Following(const Unit& unit, int64_t j, const float* panel) const;
  // The packed panel at column j of the unit, null if it is not there.
  const float* FindB(const Unit& unit, int64_t j, bool wait) const;
  void RunPanel(BlockedPanel& panel, const Operands& at, int64_t row,
                int64_t col, int64_t col_end) const;
  void RunUnit(const Unit& unit, float* a, float* sums) const;
  void RunTask(int64_t chunk, int64_t begin, int64_t end, float* packed,
               Groups* groups);
  void RunInTurn();

  const GemmProblem& problem_;
  const GemmPlan& plan_;
  const GemmBuffers& buffers_;
  const Executor& executor_;
  const BlockedKernels& kernels_;
  const int64_t summed_;  // elements along k
  const int64_t k_;       // floats in their place
  const int64_t in_, out_;
  const Blocks blocks_;
  const int64_t a_panel_, steps_;
  BlockedPanel panel_ = {};
  std::atomic<bool> failed_ = false;
};

Product::Operands Product::Step(int64_t step) const {
  const auto [a, b, y] = plan_.At(step);
  const bool aux = problem_.aux || problem_.derivative != Activation::kNone;
  return {static_cast<const char*>(buffers_.a) + a * in_,
          static_cast<const char*>(buffers_.b) + b * in_,
          problem_.bias ? static_cast<const char*>(buffers_.bias) : nullptr,
          static_cast<char*>(buffers_.y) + y * out_,
          aux ? static_cast<char*>(buffers_.aux) + y * out_ : nullptr};
}

void Product::PackA(const Operands& at, int64_t row, int64_t rows,
                    float* to) const {
  kernels_.pack({problem_.operands, at.a + row * panel_.a_row * in_, plan_.a.ld,
                 !plan_.a.transposed, rows, summed_, true, to, a_panel_});
}

void Product::PackB(const Operands& at, int64_t col, int64_t cols,
                    float* to) const {
  kernels_.pack({problem_.operands,
                 at.b + col * (plan_.b.transposed ? plan_.b.ld : 1) * in_,
                 plan_.b.ld, plan_.b.transposed, cols, summed_, false, to,
                 k_ * kernels_.cols});
}

// The lines of b that PackB() will read.
BlockedAhead Product::Ahead(const Operands& at, int64_t col,
                            int64_t cols) const {
  if (cols <= 0) return {};
  const bool along = plan_.b.transposed;
  const int64_t length = along ? summed_ : cols;
  return {.from = at.b + col * (along ? plan_.b.ld : 1) * in_,
          .ld = plan_.b.ld * in_,
          .rows = along ? cols : summed_,
          .lines = CeilDiv(length * in_, kCacheLine)};
}

BlockedAhead Product::Following(const Unit& u, int64_t j,
                                const float* panel) const {
  const int64_t next = (u.col + j) % blocks_.chunk_cols + kernels_.cols;
  const bool together =
      u.groups == nullptr || next % (kGroup * kernels_.cols) != 0;
  if (blocks_.b_direct || !together || j + kernels_.cols >= u.cols) return {};
  const int64_t size = k_ * kernels_.cols;
  return {.from = reinterpret_cast<const char*>(panel + size),
          .ld = kCacheLine,
          .rows = CeilDiv(size * 4, kCacheLine),
          .lines = 1};
}

const float* Product::FindB(const Unit& u, int64_t j, bool wait) const {
  const int64_t col = u.col + j;
  if (blocks_.b_direct) return reinterpret_cast<const float*>(u.at.b) + col;
  if (u.groups == nullptr) return u.b + j * k_;
  const int64_t width = kGroup * kernels_.cols;
  const int64_t in_chunk = col % blocks_.chunk_cols;
  const int64_t group = in_chunk / width;
  const bool there = u.groups->Has(group, wait, [&] {
    const int64_t chunk = col - in_chunk, begin = chunk + group * width;
    const int64_t end =
        std::min({begin + width, chunk + blocks_.chunk_cols, plan_.n});
    PackB(u.at, begin, end - begin, u.b + group * width * k_);
  });
  return there ? u.b + in_chunk * k_ : nullptr;
}

// A panel, or what of it is before `col_end`, with the rows that it has.
void Product::RunPanel(BlockedPanel& panel, const Operands& at, int64_t row,
                       int64_t col, int64_t col_end) const {
  panel.cols = std::min(kernels_.cols, col_end - col);
  const int64_t y = (row * plan_.y.ld + col) * out_;
  panel.epilogue.y = at.y + y;
  if (at.aux != nullptr) panel.epilogue.aux = at.aux + y;
  if (at.bias != nullptr) panel.epilogue.bias = at.bias + col * out_;
  kernels_.run(panel);
}

void Product::RunUnit(const Unit& u, float* a, float* sums) const {
  BlockedPanel panel = panel_;
  panel.sums = sums;
  if (panel.b_packed && u.groups == nullptr) PackB(u.at, u.col, u.cols, u.b);
  const int64_t panels = CeilDiv(u.cols, kernels_.cols);
  std::vector<int64_t> later;
  for (int64_t i = 0; i < u.rows; i += blocks_.rows) {
    const int64_t row = u.row + i;
    panel.rows = std::min(blocks_.rows, u.rows - i);
    if (panel.a_packed) {
      PackA(u.at, row, panel.rows, a);
      panel.a = a;
    } else {
      panel.a = reinterpret_cast<const float*>(u.at.a) + row * panel.a_row;
    }
    auto multiply = [&](int64_t j, bool wait) {
      panel.b = FindB(u, j, wait);
      if (panel.b == nullptr) return false;
      panel.ahead = Following(u, j, panel.b);
      RunPanel(panel, u.at, row, u.col + j, u.col + u.cols);
      return true;
    };
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t j = (u.first + p) % panels * kernels_.cols;
      if (!multiply(j, false)) later.push_back(j);
    }
    for (int64_t j : later) multiply(j, true);
    later.clear();
  }
  if (problem_.sums && u.col == 0) {
    SumGemmRows(problem_, buffers_.a, u.row, u.rows, buffers_.sums);
  }
}

// Units are numbered within a chunk of columns: those of the same columns
// follow each other.
void Product::RunTask(int64_t chunk, int64_t begin, int64_t end, float* packed,
                      Groups* groups) {
  thread_local Scratch scratch;
  const int64_t chunk_col = chunk * blocks_.chunk_cols;
  const int64_t chunk_cols = std::min(blocks_.chunk_cols, plan_.n - chunk_col);
  const int64_t group = blocks_.across == 1 ? 1 : kGroup * kernels_.cols;
  const int64_t groups_of_chunk = CeilDiv(chunk_cols, group);
  const int64_t rows = std::min(blocks_.rows, CeilDiv(plan_.m, blocks_.down));
  const int64_t a_size =
      panel_.a_packed ? CeilDiv(rows, kernels_.rows) * a_panel_ : 0;
  const int64_t sums_size =
      panel_.plain ? 0 : RoundUp(rows, kernels_.rows) * kernels_.cols;
  const int64_t b_size =
      panel_.b_packed && groups == nullptr
          ? k_ * RoundUp(CeilDiv(groups_of_chunk, blocks_.across) * group,
                         kernels_.cols)
          : 0;
  float* memory = nullptr;
  if (a_size + sums_size + b_size > 0) {
    memory = reinterpret_cast<float*>(
        scratch.Reserve((a_size + sums_size + b_size) * 4));
    if (memory == nullptr) {
      failed_ = true;
      return;
    }
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t down = i % blocks_.down;
    const int64_t across = i / blocks_.down % blocks_.across;
    Unit unit;
    unit.at = Step(i / (blocks_.down * blocks_.across));
    unit.row = plan_.m * down / blocks_.down;
    unit.rows = plan_.m * (down + 1) / blocks_.down - unit.row;
    const int64_t from = groups_of_chunk * across / blocks_.across * group;
    const int64_t to = groups_of_chunk * (across + 1) / blocks_.across * group;
    unit.col = chunk_col + from;
    unit.cols = std::min(to, chunk_cols) - from;
    unit.b = groups == nullptr ? memory : packed;
    unit.groups = groups;
    // Threads begin far apart (executor.h), and each with groups of its own,
    // which it packs.
    const int64_t starts =
        std::min<int64_t>(executor_.num_threads(), blocks_.down);
    unit.first = CeilDiv(unit.cols, kGroup * kernels_.cols) *
                 (down * starts / blocks_.down) / starts * kGroup;
    RunUnit(unit, memory + b_size, memory + b_size + a_size);
  }
}

// Rows are few: every thread packs them all. While the columns of a turn are
// multiplied, those of the next are asked for.
void Product::RunInTurn() {
  const int64_t work = plan_.m * plan_.n * std::max<int64_t>(32, k_);
  const int64_t tasks =
      std::clamp<int64_t>(work / kTaskWork, 1, executor_.num_threads());
  const int64_t width = blocks_.turn_cols;
  std::atomic<int64_t> next{0};
  executor_.ParallelFor(tasks, [&](int64_t) {
    thread_local Scratch scratch;
    const Operands at = Step(0);
    int64_t col = next.fetch_add(width);
    if (col >= plan_.n) return;
    const int64_t a_size = CeilDiv(plan_.m, kernels_.rows) * a_panel_;
    const int64_t sums_size =
        panel_.plain ? 0 : RoundUp(plan_.m, kernels_.rows) * kernels_.cols;
    auto* a = reinterpret_cast<float*>(
        scratch.Reserve((a_size + sums_size + width * k_) * 4));
    if (a == nullptr) {
      failed_ = true;
      return;
    }
    PackA(at, 0, plan_.m, a);
    BlockedPanel panel = panel_;
    panel.rows = plan_.m;
    panel.a = a;
    panel.sums = a + a_size;
    float* b = a + a_size + sums_size;
    while (col < plan_.n) {
      const int64_t end = std::min(col + width, plan_.n);
      PackB(at, col, end - col, b);
      if (problem_.sums && col == 0) {
        SumGemmRows(problem_, buffers_.a, 0, plan_.m, buffers_.sums);
      }
      const int64_t following = next.fetch_add(width);
      panel.ahead = Ahead(at, following, std::min(width, plan_.n - following));
      for (panel.b = b; col < end; col += kernels_.cols) {
        RunPanel(panel, at, 0, col, end);
        panel.b += kernels_.cols * k_;
      }
      col = following;
    }
  });
}

Status Product::Run() {
  if (blocks_.turn_cols > 0) {
    RunInTurn();
    return failed_ ? Status::Error("gemm: out of memory.") : Status::Ok();
  }
  const int64_t chunks = CeilDiv(plan_.n, blocks_.chunk_cols);
  const int64_t per_step = blocks_.down * blocks_.across;
  if (!blocks_.shared) {
    const int64_t units = steps_ * per_step;
    const int64_t work =
        plan_.m * blocks_.chunk_cols * std::max<int64_t>(32, k_) / per_step;
    const int64_t most = std::max<int64_t>(1, kTaskWork / work);
    const int64_t tasks = CeilDiv(units, most);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      executor_.ParallelFor(tasks, [&](int64_t task) {
        RunTask(chunk, units * task / tasks, units * (task + 1) / tasks,
                nullptr, nullptr);
      });
    }
  } else {
    thread_local Scratch scratch;
    auto* packed = reinterpret_cast<float*>(
        scratch.Reserve(RoundUp(blocks_.chunk_cols, kernels_.cols) * k_ * 4));
    if (packed == nullptr && k_ > 0) failed_ = true;
    for (int64_t i = 0; i < steps_ * chunks && !failed_; ++i) {
      Groups groups(CeilDiv(blocks_.chunk_cols, kGroup * kernels_.cols));
      const int64_t first = i / chunks * per_step;
      executor_.ParallelFor(per_step, [&](int64_t unit) {
        RunTask(i % chunks, first + unit, first + unit + 1, packed, &groups);
      });
    }
  }
  return failed_ ? Status::Error("gemm: out of memory.") : Status::Ok();
}

}  // namespace

bool BlockedSupports(const GemmProblem& problem) {
  const DType in = problem.operands;
  return (in == DType::kF32 || in == DType::kBF16 || in == DType::kF16) &&
         (problem.result == in || problem.result == DType::kF32) &&
         problem.alpha.imag() == 0 && problem.beta.imag() == 0 &&
         (problem.activation == Activation::kNone ||
          problem.derivative == Activation::kNone) &&
         !(problem.sums && problem.alpha == 0.) && kKernels.At() != nullptr;
}

Status GemmBlocked(const GemmProblem& problem, const GemmBuffers& buffers,
                   const Executor& executor) {
  return GemmBlocked(problem, buffers, executor, BestIsaWithoutTiles());
}

Status GemmBlocked(const GemmProblem& problem, const GemmBuffers& buffers,
                   const Executor& executor, Isa isa) {
  const BlockedKernels* kernels =
      problem.operands == DType::kBF16 ? kPairs.Take(isa) : nullptr;
  if (kernels == nullptr) kernels = kKernels.Take(isa);
  if (kernels == nullptr) return Status::Error("gemm: no blocks here.");
  if (problem.plan.m * problem.plan.n * problem.plan.Steps() == 0) {
    return Status::Ok();
  }
  return Product(problem, buffers, executor, *kernels).Run();
}

}  // namespace jax_layout
