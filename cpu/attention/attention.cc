// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <optional>

#include "core/arithmetic.h"
#include "cpu/attention/kernels.h"
#include "cpu/scratch.h"

namespace jax_layout {
namespace {

// Multiply-adds worth handing to another thread, about 15 microseconds.
constexpr int64_t kTaskWork = 2 << 20;
// A few tasks per thread even out what else the machine does, and that later
// queries see more.
constexpr int64_t kTasksPerThread = 4;
// Blocks of a task: for so many queries keys and values are packed once, and
// the memory of their sums is a few megabytes at most.
constexpr int64_t kLeastBlocks = 4, kMostBlocks = 40;
// Keys of a part, where queries are few.
constexpr int64_t kLeastKeys = 256;
// Floats of several tasks that are added up at a time.
constexpr int64_t kJoined = 16 << 10;

const Kernels<const AttentionKernels*> kKernels(
    "attention", {
#ifdef __x86_64__
                     {Isa::kAmx, &kAttentionAmx},
                     {Isa::kAvx512Bf16, &kAttentionAvx512Bf16},
                     {Isa::kAvx512, &kAttentionAvx512},
                     {Isa::kAvx2, &kAttentionAvx2},
#elif defined(__aarch64__)
                     {Isa::kNeon, &kAttentionNeon},
#endif
                 });

Isa IsaFor(bool fills_tiles) {
  const Isa best = BestIsa();
  return best == Isa::kAmx && fills_tiles ? best : BestIsaWithoutTiles();
}

// Those of a level, or of the one below tiles for what does not fill them.
const AttentionKernels* KernelsFor(bool fills_tiles, Isa isa) {
  return kKernels.Take(fills_tiles ? isa : std::min(isa, Isa::kAvx512Bf16));
}

bool ForwardFillsTiles(const AttentionProblem& p) {
  return FillsTiles(p) || FewFillTiles(p);
}

Status NoKernel() { return Status::Error("attention: no kernel here."); }
Status NoMemory() { return Status::Error("attention: out of memory."); }

// Into how many tasks the queries of a head are cut.
int64_t CutsOfHead(const AttentionProblem& p, int64_t blocks,
                   const Executor& executor) {
  const int64_t wanted =
      CeilDiv(executor.num_threads() * kTasksPerThread, p.batch * p.heads);
  return std::clamp<int64_t>(blocks / kLeastBlocks, 1, wanted);
}

// What a task does: blocks of one head.
struct Part {
  int64_t batch, head, cut, first, last;
};

// Some of the batch.
struct Batches {
  int64_t first, count;
};

// Calls run(part, memory) for all heads and cuts of them, small ones together.
template <class Run>
Status ForEachTask(const AttentionProblem& p, const Batches& batches,
                   int64_t blocks, int64_t cuts, int64_t floats,
                   int64_t queries, const Executor& executor, const Run& run) {
  const int64_t heads = batches.count * p.heads, tasks = heads * cuts;
  const int64_t work = blocks / cuts * queries * p.keys * p.features * 2;
  const int64_t together =
      std::clamp<int64_t>(kTaskWork / std::max<int64_t>(1, work), 1, heads);
  std::atomic<bool> failed = false;
  executor.ParallelForParts(tasks, together, [&](int64_t i, int64_t end) {
    thread_local Scratch scratch;
    auto* memory = reinterpret_cast<float*>(scratch.Reserve(floats * 4));
    if (memory == nullptr) {
      failed = true;
      return;
    }
    for (; i < end; ++i) {
      // Those that see most come first.
      const int64_t cut = cuts - 1 - i % cuts, head = i / cuts;
      run({batches.first + head / p.heads, head % p.heads, cut,
           blocks * cut / cuts, blocks * (cut + 1) / cuts},
          memory);
    }
  });
  return failed ? NoMemory() : Status::Ok();
}

Status FewQueries(const AttentionProblem& p, const AttentionBuffers& buffers,
                  const Executor& executor, const AttentionKernels& kernels) {
  // Heads whose rows alternate are read together, as they lie.
  const bool alternate = p.k.head < p.k.row && p.v.head < p.v.row;
  const int64_t together = alternate ? p.heads : 1;
  const int64_t heads = p.batch * p.heads, units = heads / together;
  const int64_t wanted =
      CeilDiv(executor.num_threads() * kTasksPerThread, units);
  const int64_t parts = std::clamp<int64_t>(p.keys / kLeastKeys, 1, wanted);
  const int64_t size = kernels.few_part(p), memory = kernels.few_memory(p);
  std::unique_ptr<float[]> sums(new (std::nothrow) float[heads * parts * size]);
  if (sums == nullptr) return NoMemory();
  const int64_t work =
      together * QueriesOfHead(p) * (p.keys / parts) * p.features * 2;
  const int64_t tasks = units * parts;
  const int64_t of_call =
      std::clamp<int64_t>(kTaskWork / std::max<int64_t>(1, work), 1, tasks);
  std::atomic<bool> failed = false;
  executor.ParallelForParts(tasks, of_call, [&](int64_t i, int64_t end) {
    thread_local Scratch scratch;
    auto* floats =
        reinterpret_cast<float*>(scratch.Reserve(together * memory * 4));
    if (floats == nullptr) {
      failed = true;
      return;
    }
    for (; i < end; ++i) {
      const int64_t first = i / parts * together;
      kernels.few({p, buffers, first / p.heads, first % p.heads, together,
                   i % parts, parts, floats, sums.get(), size});
    }
  });
  if (failed) return NoMemory();
  for (int64_t head = 0; head < heads; ++head) {
    kernels.finish_few(
        {p, buffers, head / p.heads, head % p.heads, 0, 0, nullptr},
        sums.get() + head * parts * size, parts);
  }
  return Status::Ok();
}

// Adds up parts, as kernels.join does, by pieces.
void Join(const PartsOfSums& sums, const Executor& executor,
          const AttentionKernels& kernels) {
  const int64_t rows =
      std::max<int64_t>(1, kJoined / std::max<int64_t>(1, sums.width));
  executor.ParallelFor(CeilDiv(sums.rows, rows), [&](int64_t piece) {
    PartsOfSums some = sums;
    const int64_t first = piece * rows;
    some.rows = std::min(rows, sums.rows - first);
    some.parts += first * sums.width;
    some.at += first * sums.ld;
    kernels.join(some);
  });
}

// The gradient of a bias. Tasks that run at the same time and have sums of the
// same elements add to parts of their own; where the bias is the same for all
// of the batch, `lanes` of it run at a time.
struct BiasParts {
  bool of_batch, of_head;
  int64_t lanes, cuts, kept, parts, floats, joined, size;
  std::unique_ptr<float[]> memory;
  float* sums;

  BiasParts(const AttentionProblem& p, int64_t cuts_of_head, int64_t threads,
            void* gradient)
      : of_batch(p.bias.batch != 0), of_head(p.bias.head != 0) {
    const BiasSums of_task(p);
    cuts = of_task.query != 0 ? 1 : cuts_of_head;
    lanes = of_batch ? p.batch
                     : std::clamp<int64_t>(CeilDiv(2 * threads, p.heads), 1,
                                           p.batch);
    kept = (of_batch ? p.batch : 1) * (of_head ? p.heads : 1);
    parts = (of_batch ? 1 : lanes) * (of_head ? 1 : p.heads) * cuts;
    floats = of_task.size;
    // What is added up: parts, and the groups of each if the bias has none.
    const bool by_group = of_task.group != 0 && p.bias.group == 0;
    joined = parts * (by_group ? p.groups : 1);
    size = floats * parts / joined;
    if (joined == 1 && p.bias.type == DType::kF32) {
      sums = static_cast<float*>(gradient);
      std::fill_n(sums, kept * size, 0.f);
    } else {
      memory.reset(new (std::nothrow) float[kept * joined * size]());
      sums = memory.get();
    }
  }

  float* Of(const AttentionProblem& p, const Part& part) const {
    int64_t to = of_batch ? part.batch : 0;
    int64_t at = of_batch ? 0 : part.batch % lanes;
    int64_t& by_head = of_head ? to : at;
    by_head = by_head * p.heads + part.head;
    at = at * cuts + (cuts == 1 ? 0 : part.cut);
    return sums + (to * parts + at) * floats;
  }

  void Finish(DType type, void* gradient, const Executor& executor,
              const AttentionKernels& kernels) const {
    if (memory == nullptr) return;
    // Without parts to add up, all of it is one.
    const int64_t n = joined == 1 ? kept * size : size;
    for (int64_t i = 0; i < kept * size / n; ++i) {
      const int64_t width = std::min(n, kJoined), rest = n % width;
      PartsOfSums some = {type,      sums + i * joined * size,
                          joined,    size,
                          n / width, width,
                          gradient,  i * size,
                          width};
      Join(some, executor, kernels);
      if (rest == 0) continue;
      some.parts += n - rest;
      some.at += n - rest;
      some.rows = 1;
      some.width = rest;
      Join(some, executor, kernels);
    }
  }
};

}  // namespace

bool AttentionSupports(const AttentionProblem& p) {
  return (p.type == DType::kF32 || p.type == DType::kBF16 ||
          p.type == DType::kF16) &&
         p.features <= kMostFeatures && kKernels.At() != nullptr;
}

Status Attention(const AttentionProblem& problem,
                 const AttentionBuffers& buffers, const Executor& executor) {
  return Attention(problem, buffers, executor,
                   IsaFor(ForwardFillsTiles(problem)));
}

Status Attention(const AttentionProblem& p, const AttentionBuffers& buffers,
                 const Executor& executor, Isa isa) {
  const AttentionKernels* kernels = KernelsFor(ForwardFillsTiles(p), isa);
  if (kernels == nullptr || p.features > kMostFeatures) return NoKernel();
  if (p.Rows() == 0 || p.features == 0) return Status::Ok();
  if (QueriesOfHead(p) <= kFewQueries) {
    return FewQueries(p, buffers, executor, *kernels);
  }
  const int64_t blocks = p.groups * BlocksOf(p.queries, kernels->queries);
  // Keys and values are packed once for so many queries.
  const int64_t cuts =
      std::max(CutsOfHead(p, blocks, executor), CeilDiv(blocks, kMostBlocks));
  const int64_t memory = kernels->forward_memory(p, CeilDiv(blocks, cuts));
  return ForEachTask(p, {0, p.batch}, blocks, cuts, memory, kernels->queries,
                     executor, [&](const Part& part, float* floats) {
                       kernels->forward({p, buffers, part.batch, part.head,
                                         part.first, part.last, floats});
                     });
}

Status AttentionGradient(const AttentionProblem& problem,
                         const AttentionGradientBuffers& buffers,
                         const Executor& executor) {
  return AttentionGradient(problem, buffers, executor,
                           IsaFor(FillsTiles(problem)));
}

Status AttentionGradient(const AttentionProblem& p,
                         const AttentionGradientBuffers& buffers,
                         const Executor& executor, Isa isa) {
  const AttentionKernels* kernels = KernelsFor(FillsTiles(p), isa);
  if (kernels == nullptr || p.features > kMostFeatures) return NoKernel();
  if (p.Rows() == 0 || p.features == 0) return Status::Ok();
  const int64_t blocks = p.groups * BlocksOf(p.queries, kernels->queries);
  const int64_t heads = p.batch * p.heads;
  // Cuts cost memory, and sums of what they have.
  const int64_t cuts =
      heads >= executor.num_threads() ? 1 : CutsOfHead(p, blocks, executor);
  const int64_t of_part = p.keys * p.features, of_all = heads * cuts * of_part;
  std::unique_ptr<float[]> parts;
  if (cuts > 1) {
    parts.reset(new (std::nothrow) float[2 * of_all]);
    if (parts == nullptr) return NoMemory();
  }
  std::optional<BiasParts> bias;
  if (buffers.dbias != nullptr) {
    bias.emplace(p, cuts, executor.num_threads(), buffers.dbias);
    if (bias->sums == nullptr) return NoMemory();
  }
  const int64_t memory = kernels->backward_memory(p, CeilDiv(blocks, cuts));
  const auto run = [&](const Part& part, float* floats) {
    float* dk = nullptr;
    if (cuts > 1) {
      const int64_t head = part.batch * p.heads + part.head;
      dk = parts.get() + (head * cuts + part.cut) * of_part;
    }
    kernels->backward({p, buffers, part.batch, part.head, part.first, part.last,
                       floats, dk, dk == nullptr ? nullptr : dk + of_all,
                       bias ? bias->Of(p, part) : nullptr});
  };
  // Those that add to the same sums follow each other.
  const int64_t lanes = bias ? bias->lanes : p.batch;
  for (int64_t first = 0; first < p.batch; first += lanes) {
    const Status status =
        ForEachTask(p, {first, std::min(lanes, p.batch - first)}, blocks, cuts,
                    memory, kernels->queries, executor, run);
    if (!status.ok()) return status;
  }
  for (int64_t head = 0; cuts > 1 && head < heads; ++head) {
    const int64_t at = p.k.At(head / p.heads, head % p.heads, 0, 0);
    const float* dk = parts.get() + head * cuts * of_part;
    PartsOfSums sums = {p.type,     dk,         cuts, of_part, p.keys,
                        p.features, buffers.dk, at,   p.k.row};
    Join(sums, executor, *kernels);
    sums.parts = dk + of_all;
    sums.to = buffers.dv;
    Join(sums, executor, *kernels);
  }
  if (bias) bias->Finish(p.bias.type, buffers.dbias, executor, *kernels);
  return Status::Ok();
}

}  // namespace jax_layout
