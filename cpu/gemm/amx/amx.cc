// SPDX-License-Identifier: Apache-2.0
//
// From a problem to blocks of y, one per task (see tiles.h).
#include "cpu/gemm/amx/amx.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/gemm/amx/tiles.h"
#include "cpu/isa.h"
#include "cpu/scratch.h"

namespace jax_layout {

#if defined(__x86_64__) && defined(__linux__)
namespace {

// Along k: 20 KiB of a left panel stay in L1 while the right panels, as large,
// pass by from L2. Longer blocks lose a third of the tiles' speed; shorter ones
// load and store the waiting sums more often.
constexpr int64_t kBlockK = 320;
// With few columns it is the left operand that passes by, in place: long rows.
constexpr int64_t kFewCols = 64;
constexpr int64_t kLongK = 2048;
// The packed right block (320 KiB) and the sums that wait (1 MiB) share L2.
constexpr int64_t kBlockCols = 512;
constexpr int64_t kBlockRows = 512;
// A left panel that is read this often is packed, though it could be read in
// place: in L1, rows a power of two apart evict each other.
constexpr int64_t kPackLeftCols = 128;
// Where the right operand is streamed: a page of a row, and no more rows than
// L1 has entries for pages. Two such blocks and the sums share L2.
constexpr int64_t kStreamedCols = 2048;
constexpr int64_t kStreamedK = 64;
constexpr int64_t kStreamedMinCols = 256;
constexpr int64_t kStreamedElements = 1 << 20;
// Of it, worth handing to another thread, about 15 microseconds.
constexpr int64_t kTaskElements = 64 << 10;
// Writing around the cache pays for results of this size, but not where k is
// so short that the tiles would wait for the stores.
constexpr int64_t kStreamBytes = 4 << 20;
constexpr int64_t kStreamK = 64;
// Multiply-adds worth handing to another thread, about 20 microseconds.
constexpr int64_t kTaskWork = 32 << 20;
// What takes as long as so many: an element of an operand or of the result, 0.1
// ns to read, pack or write; a block, 0.2 us.
constexpr int64_t kElementWork = 128;
constexpr int64_t kBlockWork = 256 << 10;
// A few tasks per thread even out what else the machine does.
constexpr int64_t kTasksPerThread = 4;
// y^T = b^T a^T where m is at most this, and b's rows can be read in place.
constexpr int64_t kFewRows = 64;

// The operands as tiles see them.
struct Roles {
  bool transposed;  // y^T = b^T a^T
  int64_t rows, cols;
};

int64_t Work(int64_t rows, int64_t cols, int64_t k) {
  return rows * cols * k + kElementWork * (rows * k + k * cols + rows * cols) +
         kBlockWork;
}

Roles ChooseRoles(const GemmProblem& problem) {
  const GemmPlan& p = problem.plan;
  // b's rows along k are what a left tile loads. Packing b, or transposing
  // all of a, costs more than transposing y on its way out.
  const bool transposed = p.b.transposed && !problem.sums &&
                          (p.a.transposed || (p.m <= kFewRows && p.n > p.m));
  return transposed ? Roles{true, p.n, p.m} : Roles{false, p.m, p.n};
}

struct Blocks {
  int64_t rows, cols, k;
  int64_t across, down;  // how many of them
};

Blocks ChooseBlocks(const Roles& roles, int64_t k, int64_t steps,
                    int64_t threads) {
  Blocks b;
  b.k = kAmxStep;
  if (k > 0) {
    const int64_t most = roles.cols <= kFewCols ? kLongK : kBlockK;
    b.k = RoundUp(CeilDiv(k, CeilDiv(k, most)), kAmxStep);
  }
  b.cols = std::min(kBlockCols, RoundUp(roles.cols, kAmxPanel));
  b.rows = RoundUp(roles.rows, kAmxPanel);
  if (b.k < k) {
    b.rows = std::min(
        b.rows, std::max<int64_t>(kAmxPanel, kBlockRows * kBlockCols / b.cols));
  }
  // Even blocks, and enough of them. Halves of rows pack the right operand
  // once more, halves of columns read the left one once more: what is more than
  // a task for each thread has to be worth it by its multiply-adds.
  const int64_t multiplied = roles.rows * roles.cols * k;
  const int64_t tasks = std::max(
      std::min(threads * kTasksPerThread, multiplied * steps / kTaskWork),
      std::min(threads, Work(roles.rows, roles.cols, k) * steps / kTaskWork));
  const int64_t wanted = CeilDiv(std::max<int64_t>(1, tasks), steps);
  for (;;) {
    b.down = CeilDiv(roles.rows, b.rows);
    b.across = CeilDiv(roles.cols, b.cols);
    b.rows = RoundUp(CeilDiv(roles.rows, b.down), kAmxPanel);
    b.cols = RoundUp(CeilDiv(roles.cols, b.across), kAmxPanel);
    if (b.down * b.across >= wanted) return b;
    if (b.rows >= 2 * b.cols && b.rows > kAmxGroup) {
      b.rows = RoundUp(b.rows / 2, kAmxPanel);
    } else if (b.cols > kAmxGroup) {
      b.cols = RoundUp(b.cols / 2, kAmxPanel);
    } else if (b.rows > kAmxPanel) {
      b.rows = RoundUp(b.rows / 2, kAmxPanel);
    } else {
      return b;
    }
  }
}

// Whether RunAmxStreamed() is faster. With more than a tile of rows that is so
// only where the right operand comes from beyond L2.
bool IsStreamed(const GemmProblem& problem, const Roles& roles) {
  return !problem.plan.b.transposed && !problem.sums &&
         roles.cols >= kStreamedMinCols &&
         roles.rows <= (problem.plan.k * roles.cols >= kStreamedElements
                            ? kAmxStreamedRows
                            : kAmxTile);
}

Blocks ChooseStreamedBlocks(const Roles& roles, int64_t k, int64_t steps,
                            int64_t threads) {
  Blocks b;
  b.k = kStreamedK;
  b.rows = RoundUp(roles.rows, kAmxTile);
  b.down = 1;
  // Wide blocks: the fewer, the longer the pieces of rows that are read.
  const int64_t wanted =
      std::min(CeilDiv(threads, steps),
               std::max<int64_t>(1, k * roles.cols / kTaskElements));
  b.across = std::max(CeilDiv(roles.cols, kStreamedCols), wanted);
  b.cols = RoundUp(CeilDiv(roles.cols, b.across), kAmxPanel);
  b.across = CeilDiv(roles.cols, b.cols);
  return b;
}

uint16_t RoundToBF16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool LineAligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

}  // namespace

bool AmxSupports(const GemmProblem& problem) {
  return problem.operands == DType::kBF16 &&
         (problem.result == DType::kBF16 || problem.result == DType::kF32) &&
         problem.alpha.imag() == 0 && problem.beta.imag() == 0 &&
         (problem.activation == Activation::kNone ||
          problem.derivative == Activation::kNone) &&
         !(problem.sums && problem.alpha == 0.) && BestIsa() >= Isa::kAmx;
}

Status GemmAmx(const GemmProblem& problem, const GemmBuffers& buffers,
               const Executor& executor) {
  const GemmPlan& plan = problem.plan;
  const int64_t steps = plan.Steps();
  if (plan.m == 0 || plan.n == 0 || steps == 0) return Status::Ok();
  // Without alpha the operands are not read.
  const int64_t k = problem.alpha == 0. ? 0 : plan.k;
  const Roles roles = ChooseRoles(problem);
  const bool streamed = IsStreamed(problem, roles);
  const int64_t threads = executor.num_threads();
  const Blocks blocks = streamed
                            ? ChooseStreamedBlocks(roles, k, steps, threads)
                            : ChooseBlocks(roles, k, steps, threads);
  const int64_t itemsize = problem.result == DType::kBF16 ? 2 : 4;

  AmxBlock all = {};
  all.left = {static_cast<const uint16_t*>(buffers.a), plan.a.ld,
              !plan.a.transposed};
  all.right = {static_cast<const uint16_t*>(buffers.b), plan.b.ld,
               plan.b.transposed};
  if (roles.transposed) std::swap(all.left, all.right);
  all.k = k;
  all.k_block = blocks.k;
  all.transposed = roles.transposed;
  all.ld = plan.y.ld;
  GemmEpilogue& e = all.epilogue;
  e.alpha = static_cast<float>(problem.alpha.real());
  e.beta = static_cast<float>(problem.beta.real());
  e.result = problem.result;
  e.activation = problem.activation;
  e.derivative = problem.derivative;
  e.write_aux = problem.aux;
  e.bias = static_cast<const char*>(buffers.bias);
  e.y = static_cast<char*>(buffers.y);
  e.aux = static_cast<char*>(buffers.aux);
  if (!problem.bias) e.bias = nullptr;
  all.result_is_plain = itemsize == 2 && problem.alpha == 1. &&
                        problem.beta == 0. && !problem.bias && !problem.aux &&
                        problem.activation == Activation::kNone &&
                        problem.derivative == Activation::kNone;
  const bool large = plan.m * plan.n * steps * itemsize >= kStreamBytes &&
                     k >= kStreamK && plan.y.ld * itemsize % 64 == 0;

  std::vector<float> sums(problem.sums ? plan.m : 0);
  const int64_t per_step = blocks.down * blocks.across;
  const int64_t panels = blocks.k / kAmxStep * kAmxStepBytes + kAmxPanelPad;
  const int64_t right_bytes =
      streamed ? kAmxTurns * kAmxStepBytes : blocks.cols / kAmxPanel * panels;
  const int64_t left_bytes = kAmxGroup / kAmxPanel * panels;
  const int64_t waiting_bytes =
      streamed || blocks.k < k ? blocks.rows * blocks.cols * 4 : 0;
  std::atomic<bool> failed = false;

  auto run = [&](int64_t unit) {
    AmxBlock block = all;
    const auto [a, b, y] = plan.At(unit / per_step);
    block.left.data += roles.transposed ? b : a;
    block.right.data += roles.transposed ? a : b;
    const int64_t i = unit % per_step % blocks.down * blocks.rows;
    const int64_t j = unit % per_step / blocks.down * blocks.cols;
    block.rows = std::min(blocks.rows, roles.rows - i);
    block.cols = std::min(blocks.cols, roles.cols - j);
    block.left.data += i * (block.left.k_contiguous ? block.left.ld : 1);
    block.right.data += j * (block.right.k_contiguous ? block.right.ld : 1);
    const int64_t row = roles.transposed ? j : i;
    const int64_t col = roles.transposed ? i : j;
    block.epilogue.y += (y + row * plan.y.ld + col) * itemsize;
    if (e.aux != nullptr) {
      block.epilogue.aux += (y + row * plan.y.ld + col) * itemsize;
    }
    if (e.bias != nullptr) block.epilogue.bias += col * itemsize;
    block.stream = large && LineAligned(block.epilogue.y);
    block.pack_left = block.cols >= kPackLeftCols;
    if (problem.sums && j == 0) block.row_sums = sums.data() + i;
    thread_local Scratch scratch;
    char* memory = scratch.Reserve(right_bytes + left_bytes + waiting_bytes);
    if (memory == nullptr) {
      failed = true;
      return;
    }
    block.packed_right = memory;
    block.packed_left = memory + right_bytes;
    block.accumulators =
        reinterpret_cast<float*>(memory + right_bytes + left_bytes);
    streamed ? RunAmxStreamed(block) : RunAmxBlock(block);
  };

  const int64_t units = steps * per_step;
  const int64_t work = Work(std::min(blocks.rows, roles.rows),
                            std::min(blocks.cols, roles.cols), k);
  const int64_t together = std::max<int64_t>(1, kTaskWork / work);
  executor.ParallelForParts(units, together, [&](int64_t unit, int64_t end) {
    for (; unit < end; ++unit) run(unit);
  });
  if (failed) return Status::Error("gemm: out of memory.");

  for (int64_t i = 0; i < static_cast<int64_t>(sums.size()); ++i) {
    if (itemsize == 2) {
      static_cast<uint16_t*>(buffers.sums)[i] = RoundToBF16(sums[i]);
    } else {
      static_cast<float*>(buffers.sums)[i] = sums[i];
    }
  }
  return Status::Ok();
}

#else

bool AmxSupports(const GemmProblem&) { return false; }
Status GemmAmx(const GemmProblem&, const GemmBuffers&, const Executor&) {
  return Status::Error("gemm: no AMX here.");
}

#endif  // __x86_64__ && __linux__

}  // namespace jax_layout
