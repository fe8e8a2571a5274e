// SPDX-License-Identifier: Apache-2.0
//
// oneDNN's convolution: one sequential primitive to a part, parts over the
// pool. Its fast kernels want channels innermost, or in blocks, and weights in
// an order of their own. Arrays in another order are moved: what all parts
// read, first and by all threads; the rest part by part, where it stays in
// cache.
#include "cpu/conv/onednn/onednn.h"

#if __has_include(<oneapi/dnnl/dnnl.h>)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/conv/onednn/primitive.h"
#include "cpu/conv/parts.h"
#include "cpu/pages.h"

namespace jax_layout {
namespace {

using namespace onednn;

constexpr int64_t kAlign = 4096;
int64_t Pages(int64_t bytes) { return CeilDiv(bytes, kAlign) * kAlign; }

const Onednn& Library() { return OnednnLibrary(); }

// ---- Plans ----

// A piece of an array that is moved by all threads before or after the parts.
struct Piece {
  ArrayId id;
  Move move;
  int64_t user;  // where its piece of the caller's array begins, in bytes
};

struct Task {
  int convolution = 0;  // of this shape
  ConvPart part;
};

struct Plan {
  ConvProblem problem;
  std::vector<Convolution> convolutions;
  std::vector<Task> tasks;
  std::array<bool, kArrays> shared = {};  // moved ahead, for all tasks
  std::vector<Piece> pieces;
  bool partial = false;  // each task sums a part of all of w

  // The workspace: the library's x, w, y (if shared) or its partial sums of w,
  // then for each thread what a task needs.
  std::array<int64_t, kArrays> base = {};
  int64_t partial_bytes = 0;
  std::array<int64_t, kArrays> slot_base = {};
  int64_t scratchpad_base = 0, slots_base = 0, slot_bytes = 0;
  int64_t slots = 1, bytes = 0;
  std::string w_format;
};

int64_t Begin(const ConvPart& part, ArrayId id) {
  return id == kX ? part.x : id == kW ? part.w : id == kY ? part.y : part.bias;
}

bool SameShape(const ConvProblem& a, const ConvProblem& b) {
  return a.batch == b.batch && a.groups == b.groups &&
         a.in_channels == b.in_channels && a.out_channels == b.out_channels &&
         a.in == b.in && a.out == b.out && a.pad_low == b.pad_low &&
         a.pad_high == b.pad_high;
}

// So much of an array is worth a task of its own.
constexpr int64_t kPieceBytes = 1 << 18;

// How many elements along an axis the order of an array keeps together.
int64_t BlockOf(const_dnnl_memory_desc_t desc, int axis) {
  const Onednn& dnnl = Library();
  int count = 0;
  dnnl_dims_t* blocks = nullptr;
  dnnl_dims_t* axes = nullptr;
  dnnl.memory_desc_query(desc, dnnl_query_inner_nblks_s32, &count);
  dnnl.memory_desc_query(desc, dnnl_query_inner_blks, &blocks);
  dnnl.memory_desc_query(desc, dnnl_query_inner_idxs, &axes);
  int64_t block = 1;
  for (int i = 0; i < count; ++i) {
    if ((*axes)[i] == axis) block *= (*blocks)[i];
  }
  return block;
}

// Cuts the move of an array that all tasks share into pieces.
dnnl_status_t MakePieces(const ConvProblem& p, const Array& array, ArrayId id,
                         std::vector<Piece>* pieces) {
  const Onednn& dnnl = Library();
  const bool result = id == ResultId(p.pass);
  const MemoryDesc& whole = result ? array.move.from : array.move.to;
  const Box box = UserBox(p, id);
  // Along the outermost axis of the library's order, about.
  int axis = 0;
  if (id == kW) {
    axis = p.groups == 1 && p.pass == ConvPass::kInputGrad ? 1 : 0;
  } else {
    while (axis < box.rank - 1 && box.dims[axis] == 1) ++axis;
    const int64_t block = id == kX ? p.x.block : p.y.block;
    if (axis == 1 && block == 1) axis = 2;
  }
  const int64_t unit = BlockOf(whole, axis);
  const int64_t units = CeilDiv(box.dims[axis], unit);
  const int64_t count =
      std::clamp<int64_t>(array.bytes / kPieceBytes, 1, units);
  const int64_t step = CeilDiv(units, count) * unit;
  const int64_t item = ItemSize(UserType(p, id));
  for (int64_t at = 0; at < box.dims[axis]; at += step) {
    Box user = box;
    user.dims[axis] = std::min(step, box.dims[axis] - at);
    dnnl_dims_t offsets = {};
    offsets[axis] = at;
    Piece piece = {id, {}, at * box.strides[axis] * item};
    MemoryDesc mine, library;
    dnnl_status_t status = Describe(user, OnednnType(UserType(p, id)), &mine);
    if (!status) {
      status = dnnl.memory_desc_create_submemory(library.out(), whole,
                                                 user.dims, offsets);
    }
    if (status) return status;
    (result ? piece.move.to : piece.move.from) = std::move(mine);
    (result ? piece.move.from : piece.move.to) = std::move(library);
    status = piece.move.Make();
    if (status) return status;
    pieces->push_back(std::move(piece));
  }
  return dnnl_success;
}

// Makes the convolutions of all parts, of which many have the same shape.
dnnl_status_t MakeTasks(const ConvProblem& p, const Way& way,
                        const ConvTiling& tiling, bool one_weight_order,
                        Plan* plan) {
  for (int64_t i = 0; i < tiling.Count(); ++i) {
    Task task;
    task.part.problem = p;
    if (!tiling.Cut(i, &task.part)) return dnnl_unimplemented;
    int& c = task.convolution;
    const int known = static_cast<int>(plan->convolutions.size());
    while (c < known &&
           !SameShape(plan->convolutions[c].problem, task.part.problem)) {
      ++c;
    }
    if (c == known) {
      Convolution conv;
      const_dnnl_memory_desc_t weights = nullptr;
      if (one_weight_order && known > 0) {
        weights = plan->convolutions[0].arrays[kW].desc;
      }
      const dnnl_status_t status =
          MakeConvolution(task.part.problem, way, weights, &conv);
      if (status) return status;
      plan->convolutions.push_back(std::move(conv));
    }
    plan->tasks.push_back(std::move(task));
  }
  return dnnl_success;
}

// The order in which all tasks read w as it is, see WeightsFormat. Those of
// other output channels begin where row-major w would have them.
std::string CommonWeightsFormat(const Plan& plan) {
  const ConvProblem& p = plan.problem;
  const auto format = [](const Convolution& conv) {
    const Array& w = conv.arrays[kW];
    return w.type == conv.problem.type ? WeightsFormat(conv.problem, w.desc)
                                       : std::string();
  };
  const std::string name = format(plan.convolutions[0]);
  for (const Convolution& conv : plan.convolutions) {
    if (format(conv) != name) return "";
  }
  const MemoryDesc& desc = plan.convolutions[0].arrays[kW].desc;
  for (const Task& task : plan.tasks) {
    const int64_t first = task.part.bias;  // output channel
    if (first != 0 && (name[name[0] == 'D' ? 1 : 0] != 'O' ||
                       first % BlockOf(desc, 0) != 0)) {
      return "";
    }
  }
  return p.pass == ConvPass::kForward ? name : "";
}

dnnl_status_t MakePlan(const ConvProblem& p, const Way& way,
                       const ConvTiling& tiling, Plan* plan) {
  const Onednn& dnnl = Library();
  *plan = {};
  plan->problem = p;
  const bool one_w = tiling.channels == tiling.all_channels;
  dnnl_status_t status = MakeTasks(p, way, tiling, one_w, plan);
  if (status) return status;

  plan->w_format = CommonWeightsFormat(*plan);
  if (p.w_format != "" && p.w_format != plan->w_format) {
    return dnnl_unimplemented;
  }
  const ArrayId result = ResultId(p.pass);
  const Convolution& conv = plan->convolutions[0];
  const bool whole_batch =
      tiling.images == tiling.all_images && tiling.rows == tiling.all_rows;
  plan->partial = result == kW && !whole_batch;
  // What one operand of the tasks has in common; with one task, all is moved in
  // pieces, for more than one thread to do it.
  if (p.pass != ConvPass::kWeightGrad) plan->shared[kW] = one_w;
  const ArrayId other = p.pass == ConvPass::kInputGrad ? kY : kX;
  plan->shared[other] = whole_batch && p.groups == 1;
  for (ArrayId id : {kX, kW, kY}) {
    plan->shared[id] &= conv.arrays[id].moved;
    if (!plan->shared[id]) continue;
    if (id == kW) {
      status = MakePieces(p, conv.arrays[kW], kW, &plan->pieces);
    } else {
      Array array;
      array.type = conv.arrays[id].type;
      status = MakeActivation(p, id, way, p.type, false, &array);
      if (!status) status = MakePieces(p, array, id, &plan->pieces);
    }
    if (status) return status;
    plan->base[id] = plan->bytes;
    plan->bytes += Pages(conv.arrays[id].bytes);
  }
  if (plan->partial) {
    plan->base[kW] = plan->bytes;
    plan->partial_bytes = Pages(conv.arrays[kW].bytes);
    plan->bytes += plan->partial_bytes * plan->tasks.size();
    Array w;
    w.type = conv.arrays[kW].type;
    w.bytes = conv.arrays[kW].bytes;
    status = dnnl.memory_desc_clone(w.move.from.out(), conv.arrays[kW].desc);
    if (!status) status = MakePieces(p, w, kW, &plan->pieces);
    if (status) return status;
  }

  int64_t scratchpad = 0;
  std::array<int64_t, kArrays> most = {};
  for (const Convolution& c : plan->convolutions) {
    scratchpad = std::max(scratchpad, c.scratchpad.bytes);
    for (ArrayId id : {kX, kW, kY, kBias}) {
      const Array& array = c.arrays[id];
      if (!array.moved || plan->shared[id] || (plan->partial && id == kW)) {
        continue;
      }
      most[id] = std::max(most[id], array.bytes);
      scratchpad = std::max(scratchpad, array.move.scratchpad.bytes);
    }
  }
  for (const Piece& piece : plan->pieces) {
    scratchpad = std::max(scratchpad, piece.move.scratchpad.bytes);
  }
  for (ArrayId id : {kX, kW, kY, kBias}) {
    plan->slot_base[id] = plan->slot_bytes;
    plan->slot_bytes += Pages(most[id]);
  }
  plan->scratchpad_base = plan->slot_bytes;
  plan->slot_bytes += Pages(scratchpad);
  plan->slots_base = plan->bytes;
  // Pieces need the scratchpad only, but any thread may move one.
  plan->slots = std::min<int64_t>(
      std::max(plan->tasks.size(), plan->pieces.size()), ProcessorCount());
  plan->bytes += plan->slots * plan->slot_bytes;
  return dnnl_success;
}

// ---- The run ----

// y = max(y, 0), which leaves NaN.
template <typename T>
void Relu(T* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = y[i] < 0 ? 0 : y[i];
}
void Relu16(uint16_t* y, int64_t count, uint16_t infinity) {
  for (int64_t i = 0; i < count; ++i) {
    y[i] = y[i] > 0x8000 && y[i] <= infinity ? 0 : y[i];
  }
}

void ReluOf(const Array& y, void* data) {
  const int64_t count = y.bytes / ItemSize(y.type);
  switch (y.type) {
    case DType::kF32:
      return Relu(static_cast<float*>(data), count);
    case DType::kS32:
      return Relu(static_cast<int32_t*>(data), count);
    case DType::kBF16:
      return Relu16(static_cast<uint16_t*>(data), count, 0xff80);
    default:
      return Relu16(static_cast<uint16_t*>(data), count, 0xfc00);
  }
}

dnnl_status_t RunTask(const Plan& plan, const Task& task, int64_t index,
                      const std::array<char*, kArrays>& user, char* memory,
                      char* slot) {
  const Convolution& conv = plan.convolutions[task.convolution];
  const ConvProblem& p = plan.problem;
  const ArrayId result = ResultId(p.pass);
  char* scratchpad = slot + plan.scratchpad_base;
  std::array<char*, kArrays> mine, library;
  dnnl_status_t status = dnnl_success;
  for (ArrayId id : {kX, kW, kY, kBias}) {
    const Array& array = conv.arrays[id];
    if (!array.used) continue;
    mine[id] = user[id] + Begin(task.part, id) * ItemSize(UserType(p, id));
    library[id] = mine[id];
    if (plan.partial && id == kW) {
      library[id] = memory + plan.base[kW] + index * plan.partial_bytes;
    } else if (plan.shared[id]) {
      library[id] = memory + plan.base[id];
    } else if (array.moved) {
      library[id] = slot + plan.slot_base[id];
      if (id == result) continue;
      status = array.move.Run(mine[id], library[id], scratchpad);
      if (status) return status;
    }
  }
  status = RunConvolution(conv, library, scratchpad);
  if (status) return status;
  const Array& array = conv.arrays[result];
  if (p.relu) ReluOf(array, library[result]);
  if (array.moved && !(plan.partial && result == kW)) {
    status = array.move.Run(library[result], mine[result], scratchpad);
  }
  return status;
}

// Calls fn(i, slot) for each i below n, with memory that no other call has.
template <typename Fn>
void ForEachInSlots(int64_t n, int64_t slots, char* memory, int64_t slot_bytes,
                    const Executor& executor, const Fn& fn) {
  std::atomic<int64_t> next{0};
  executor.ParallelFor(std::min(n, slots), [&](int64_t slot) {
    const OnednnSequential sequential;
    for (int64_t i; (i = next.fetch_add(1)) < n;) {
      fn(i, memory + slot * slot_bytes);
    }
  });
}

void AddPartials(const Plan& plan, char* first, const Executor& executor) {
  constexpr int64_t kFloats = 1 << 14;
  const int64_t size = plan.partial_bytes / sizeof(float);
  const int64_t partials = plan.tasks.size();
  executor.ParallelFor(CeilDiv(size, kFloats), [&](int64_t i) {
    float* sum = reinterpret_cast<float*>(first) + i * kFloats;
    const int64_t count = std::min(kFloats, size - i * kFloats);
    for (int64_t k = 1; k < partials; ++k) {
      const float* add = sum + k * size;
      for (int64_t j = 0; j < count; ++j) sum[j] += add[j];
    }
  });
}

Status Failure(dnnl_status_t status) {
  if (status == dnnl_success) return Status::Ok();
  return Status::Error(std::string("conv: oneDNN reports ") +
                       Library().status2str(status) + ".");
}

Status Run(const Plan& plan, const ConvBuffers& buffers,
           const Executor& executor) {
  char* memory = static_cast<char*>(buffers.workspace);
  TouchPages(memory, plan.bytes, executor);
  const std::array<char*, kArrays> user = {
      static_cast<char*>(buffers.x), static_cast<char*>(buffers.w),
      static_cast<char*>(buffers.y),
      static_cast<char*>(const_cast<void*>(buffers.bias))};
  std::atomic<dnnl_status_t> failure{dnnl_success};
  const auto each = [&](int64_t n, const auto& fn) {
    ForEachInSlots(n, plan.slots, memory + plan.slots_base, plan.slot_bytes,
                   executor, [&](int64_t i, char* slot) {
                     const dnnl_status_t status = fn(i, slot);
                     if (status) failure = status;
                   });
  };
  const ArrayId result = ResultId(plan.problem.pass);
  const auto move_pieces = [&](bool results) {
    std::vector<const Piece*> pieces;
    for (const Piece& piece : plan.pieces) {
      if ((piece.id == result) == results) pieces.push_back(&piece);
    }
    each(pieces.size(), [&](int64_t i, char* slot) {
      const Piece& piece = *pieces[i];
      char* mine = user[piece.id] + piece.user;
      char* library = memory + plan.base[piece.id];
      return piece.move.Run(results ? library : mine, results ? mine : library,
                            slot + plan.scratchpad_base);
    });
  };
  move_pieces(false);
  each(plan.tasks.size(), [&](int64_t i, char* slot) {
    return RunTask(plan, plan.tasks[i], i, user, memory, slot);
  });
  if (plan.partial && !failure) {
    AddPartials(plan, memory + plan.base[kW], executor);
    move_pieces(true);
  }
  return Failure(failure);
}

// ---- The choice ----

// So many products are worth waking up a thread, which takes about 50 us; of 16
// bits there are several times more in that time.
constexpr int64_t kMinProducts = int64_t{1} << 22;
constexpr int64_t kMinProducts16 = int64_t{1} << 24;
constexpr int64_t kTasksPerThread = 4;

// Cuts images first, then rows, then channels.
ConvTiling ChooseTiling(const ConvProblem& p, const Way& way) {
  ConvTiling t = WholeConv(p);
  const int64_t weights =
      p.out_channels * (p.in_channels / p.groups) * ConvProduct(p.kernel);
  const int64_t products = p.batch * ConvProduct(p.out) * weights;
  const int64_t least_products =
      ItemSize(p.type) < 4 ? kMinProducts16 : kMinProducts;
  const int64_t wanted = std::min<int64_t>(kTasksPerThread * ProcessorCount(),
                                           products / least_products);
  if (wanted <= 1) return t;
  const int64_t moved = p.batch * (p.in_channels * ConvProduct(p.in) +
                                   p.out_channels * ConvProduct(p.out));
  // Each task adds to the gradient of all weights, or makes some of them.
  const bool sums =
      p.pass != ConvPass::kWeightGrad || wanted * weights <= moved / 2;
  if (sums) {
    t.images = CeilDiv(p.batch, wanted);
    int64_t left = CeilDiv(wanted, CeilDiv(p.batch, t.images));
    // Rows of blocks are not dense.
    const int64_t row = ConvProduct(p.out) / t.all_rows;
    const int64_t least =
        std::max<int64_t>(p.stride[t.axis] * p.kernel[t.axis],
                          CeilDiv(128, std::max<int64_t>(row, 1)));
    if (left > 1 && way.block == 1 && t.all_rows >= 2 * least) {
      t.rows = std::max(least, CeilDiv(t.all_rows, left));
      const int64_t stride = p.stride[t.axis];
      t.rows = CeilDiv(t.rows, stride) * stride;
    }
    if (t.Count() * 2 > wanted) return t;
    if (p.pass == ConvPass::kWeightGrad) return t;
  }
  // Whole groups, whole blocks, and enough for the library's kernels.
  const int64_t blocks = std::lcm(p.x.block, p.y.block);
  int64_t unit = std::lcm(blocks, int64_t{32});
  if (p.groups > 1) {
    const int64_t ins = p.in_channels / p.groups;
    const int64_t outs = p.out_channels / p.groups;
    unit = t.all_channels / p.groups *
           (blocks / std::gcd(blocks, std::gcd(ins, outs)));
  }
  const int64_t left = CeilDiv(wanted, t.Count());
  t.channels = std::min(CeilDiv(CeilDiv(t.all_channels, left), unit) * unit,
                        t.all_channels);
  return t;
}

}  // namespace

bool OnednnSums16(DType type) {
  if (!Library().loaded()) return false;
#ifdef __x86_64__
  const int isa = Library().get_effective_cpu_isa();
  const int wanted = type == DType::kBF16 ? dnnl_cpu_isa_avx512_core_bf16
                                          : dnnl_cpu_isa_avx512_core_fp16;
  return (isa & wanted) == wanted;
#else
  return type == DType::kBF16;
#endif
}

Status ChooseOnednnConv(const ConvProblem& p, ConvKernel* kernel) {
  if (!Library().loaded()) return Status::Error("oneDNN is not there");
  if (p.type == DType::kS8 && !OnednnSumsInt8()) {
    return Status::Error("oneDNN's sums of int8 saturate without VNNI");
  }
  const OnednnSequential sequential;
  std::vector<Way> ways;
  // Where both are in blocks, f32 kernels read them as they are; those of 16
  // bits want channels innermost.
  const int64_t block = p.x.block == p.y.block ? p.x.block : 1;
  if (p.type == DType::kF32 && (block == 8 || block == 16)) {
    ways.push_back({.block = block});
  }
  ways.push_back({});
  // Of 16 bits, its other kernels are plain loops.
  if (ItemSize(p.type) != 2) ways.push_back({.any = true});
  auto plan = std::make_shared<Plan>();
  dnnl_status_t status = dnnl_unimplemented;
  for (const Way& way : ways) {
    for (const ConvTiling& tiling : {ChooseTiling(p, way), WholeConv(p)}) {
      status = MakePlan(p, way, tiling, plan.get());
      if (!status) break;
    }
    if (!status) break;
  }
  if (status) return Failure(status);
  kernel->workspace = plan->bytes;
  kernel->w_format = plan->w_format;
  kernel->implementation = "oneDNN " + plan->convolutions[0].implementation;
  kernel->run = [plan](const ConvBuffers& buffers, const Executor& executor) {
    return Run(*plan, buffers, executor);
  };
  return Status::Ok();
}

}  // namespace jax_layout

#else  // built without its headers

namespace jax_layout {

bool OnednnSums16(DType) { return false; }

Status ChooseOnednnConv(const ConvProblem&, ConvKernel*) {
  return Status::Error("built without oneDNN");
}

}  // namespace jax_layout
#endif
