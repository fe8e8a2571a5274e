// SPDX-License-Identifier: Apache-2.0
//
// oneDNN's convolution: one sequential primitive to a part, parts over the
// pool. Its fast kernels want channels innermost, or in blocks, and weights in
// an order of their own. Arrays in another order are moved: what all parts
// read, first and by all threads; the rest part by part, where it stays in
// cache.
#include "cpu/conv_onednn.h"

#if __has_include(<oneapi/dnnl/dnnl.h>)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/conv_parts.h"
#include "cpu/gemm_tiles.h"
#include "cpu/onednn.h"
#include "cpu/pages.h"

namespace jax_layout {
namespace {

using namespace onednn;

constexpr int64_t kAlign = 4096;
int64_t Pages(int64_t bytes) { return CeilDiv(bytes, kAlign) * kAlign; }

const Onednn& Library() { return OnednnLibrary(); }

enum ArrayId { kX, kW, kY, kBias, kArrays };

// How the library is to compute a problem.
struct Way {
  bool widened = false;  // 16-bit operands are converted to f32
  int64_t block = 1;     // of the channels of x and y; 1: they are innermost
  bool any = false;      // whatever kernel it has, be it slow
};

// ---- Descriptions of memory ----

struct Box {
  int rank = 0;
  dnnl_dims_t dims = {}, strides = {};
  void Add(int64_t extent, int64_t stride) {
    dims[rank] = extent;
    strides[rank++] = stride;
  }
};

dnnl_status_t Describe(const Box& box, dnnl_data_type_t type,
                       MemoryDesc* desc) {
  return Library().memory_desc_create_with_strides(desc->out(), box.rank,
                                                   box.dims, type, box.strides);
}

struct Activation {  // x or y of a problem
  int64_t batch, channels;
  const std::array<int64_t, 3>& spatial;
  const ConvLayout& layout;
  int first;  // spatial axis: the library is told of two or three
};

int FirstAxis(const ConvProblem& p) {
  return p.in[0] == 1 && p.out[0] == 1 && p.kernel[0] == 1 ? 1 : 0;
}

Activation ActivationOf(const ConvProblem& p, ArrayId id) {
  return id == kX
             ? Activation{p.batch, p.in_channels, p.in, p.x, FirstAxis(p)}
             : Activation{p.batch, p.out_channels, p.out, p.y, FirstAxis(p)};
}

// As it lies in memory; the inner part of blocks is an axis, the last.
Box UserBox(const Activation& a) {
  Box box;
  box.Add(a.batch, a.layout.strides[0]);
  box.Add(a.channels / a.layout.block, a.layout.strides[1]);
  for (int i = a.first; i < 3; ++i) {
    box.Add(a.spatial[i], a.layout.strides[2 + i]);
  }
  if (a.layout.block > 1) box.Add(a.layout.block, 1);
  return box;
}

// The same axes, dense, with channels innermost.
Box ChannelsLastBox(const Activation& a) {
  Box box;
  const int64_t area = ConvProduct(a.spatial);
  box.Add(a.batch, area * a.channels);
  box.Add(a.channels / a.layout.block, a.layout.block);
  int64_t stride = area * a.channels;
  for (int i = a.first; i < 3; ++i) {
    stride /= a.spatial[i];
    box.Add(a.spatial[i], stride);
  }
  if (a.layout.block > 1) box.Add(a.layout.block, 1);
  return box;
}

// The same axes, dense, with channels in blocks, where the layout has them so.
Box BlockedBox(const Activation& a) {
  Box box;
  const int64_t area = ConvProduct(a.spatial);
  box.Add(a.batch, area * a.channels);
  box.Add(a.channels / a.layout.block, area * a.layout.block);
  int64_t stride = area * a.layout.block;
  for (int i = a.first; i < 3; ++i) {
    stride /= a.spatial[i];
    box.Add(a.spatial[i], stride);
  }
  box.Add(a.layout.block, 1);
  return box;
}

bool SameMemory(const Box& a, const Box& b) {
  for (int i = 0; i < a.rank; ++i) {
    if (a.dims[i] != 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

Box WeightsBox(const ConvProblem& p) {
  Box box;
  const int64_t out = p.out_channels / p.groups;
  if (p.groups > 1) box.Add(p.groups, out * p.w.strides[0]);
  box.Add(out, p.w.strides[0]);
  box.Add(p.in_channels / p.groups, p.w.strides[1]);
  for (int i = FirstAxis(p); i < 3; ++i) {
    box.Add(p.kernel[i], p.w.strides[2 + i]);
  }
  return box;
}

// ---- Primitives ----

struct Scratchpad {
  MemoryDesc desc;
  int64_t bytes = 0;

  dnnl_status_t Make(const_dnnl_primitive_desc_t primitive) {
    const Onednn& dnnl = Library();
    bytes = dnnl.memory_desc_get_size(
        dnnl.primitive_desc_query_md(primitive, dnnl_query_scratchpad_md, 0));
    const dnnl_dims_t dims = {bytes}, dense = {1};
    return dnnl.memory_desc_create_with_strides(desc.out(), 1, dims, dnnl_u8,
                                                dense);
  }
};

dnnl_status_t MakeAttr(Attr* attr) {
  dnnl_status_t status = Library().primitive_attr_create(attr->out());
  if (status) return status;
  return Library().primitive_attr_set_scratchpad_mode(
      *attr, dnnl_scratchpad_mode_user);
}

// Executes a primitive with memory that is made for the call.
class Call {
 public:
  void Bind(int arg, const_dnnl_memory_desc_t desc, const void* data) {
    if (status_) return;
    status_ =
        Library().memory_create(memories_[count_].out(), desc, Library().engine,
                                const_cast<void*>(data));
    args_[count_] = {arg, memories_[count_]};
    ++count_;
  }
  dnnl_status_t Run(dnnl_primitive_t primitive) {
    static thread_local Stream stream;
    if (!status_ && stream == nullptr) {
      status_ = Library().stream_create(stream.out(), Library().engine,
                                        dnnl_stream_in_order);
    }
    if (status_) return status_;
    return Library().primitive_execute(primitive, stream, count_, args_.data());
  }

 private:
  dnnl_status_t status_ = dnnl_success;
  int count_ = 0;
  std::array<Memory, 5> memories_;
  std::array<dnnl_exec_arg_t, 5> args_;
};

// Copies an array into another order or type.
struct Move {
  MemoryDesc from, to;
  Primitive primitive;
  Scratchpad scratchpad;

  // Takes `from` and `to` as they are.
  dnnl_status_t Make() {
    const Onednn& dnnl = Library();
    Attr attr;
    PrimitiveDesc desc;
    dnnl_status_t status = MakeAttr(&attr);
    if (!status) {
      status = dnnl.reorder_primitive_desc_create(desc.out(), from, dnnl.engine,
                                                  to, dnnl.engine, attr);
    }
    if (!status) status = scratchpad.Make(desc);
    if (!status) status = dnnl.primitive_create(primitive.out(), desc);
    return status;
  }

  dnnl_status_t Run(const void* source, void* target, void* memory) const {
    Call call;
    call.Bind(DNNL_ARG_FROM, from, source);
    call.Bind(DNNL_ARG_TO, to, target);
    call.Bind(DNNL_ARG_SCRATCHPAD, scratchpad.desc, memory);
    return call.Run(primitive);
  }
};

// An array of a part.
struct Array {
  bool used = true;
  DType type = DType::kF32;  // of the library's
  MemoryDesc desc;           // the library's
  bool moved = false;        // it is not the caller's
  Move move;                 // from the caller's, or to it
  int64_t bytes = 0;         // of the library's
};

// One part's shape.
struct Convolution {
  ConvProblem problem;
  std::array<Array, kArrays> arrays;
  Primitive primitive;
  Scratchpad scratchpad;
  std::string implementation;
};

ArrayId ResultId(ConvPass pass) {
  return pass == ConvPass::kForward     ? kY
         : pass == ConvPass::kInputGrad ? kX
                                        : kW;
}

// The memory the library sees of x or y, described anew with the caller's axes
// where it has more than the library knows, and whether it is the caller's.
dnnl_status_t MakeActivation(const ConvProblem& p, ArrayId id, const Way& way,
                             DType user_type, bool result, Array* array) {
  const Onednn& dnnl = Library();
  const Activation a = ActivationOf(p, id);
  const Box user = UserBox(a);
  const dnnl_data_type_t type = OnednnType(array->type);
  MemoryDesc same_axes;
  dnnl_status_t status = dnnl_success;
  bool same = false;
  if (way.block == 1) {
    const Box box = ChannelsLastBox(a);
    same = SameMemory(user, box);
    status = Describe(box, type, &same_axes);
    const ConvLayout plain = {};
    Box library =
        ChannelsLastBox({a.batch, a.channels, a.spatial, plain, a.first});
    if (!status) status = Describe(library, type, &array->desc);
  } else {
    if (a.channels % way.block != 0) return dnnl_unimplemented;
    const dnnl_format_tag_t tag =
        way.block == 16 ? (a.first == 0 ? dnnl_nCdhw16c : dnnl_nChw16c)
                        : (a.first == 0 ? dnnl_nCdhw8c : dnnl_nChw8c);
    dnnl_dims_t dims = {a.batch, a.channels};
    const int rank = 5 - a.first;
    for (int i = 2; i < rank; ++i) dims[i] = a.spatial[a.first + i - 2];
    status = dnnl.memory_desc_create_with_tag(array->desc.out(), rank, dims,
                                              type, tag);
    if (a.layout.block == way.block) {
      const Box box = BlockedBox(a);
      same = SameMemory(user, box);
      if (!status) status = Describe(box, type, &same_axes);
    } else if (a.layout.block == 1) {
      if (!status)
        status = dnnl.memory_desc_clone(same_axes.out(), array->desc);
    } else {
      return dnnl_unimplemented;
    }
  }
  if (status) return status;
  array->bytes = dnnl.memory_desc_get_size(array->desc);
  array->moved = !same || user_type != array->type;
  if (!array->moved) return status;
  MemoryDesc& mine = result ? array->move.to : array->move.from;
  (result ? array->move.from : array->move.to) = std::move(same_axes);
  status = Describe(user, OnednnType(user_type), &mine);
  if (!status) status = array->move.Make();
  return status;
}

dnnl_status_t MakeVector(const ConvProblem& p, Array* array) {
  array->used = p.bias;
  if (!p.bias) return dnnl_success;
  Box box;
  box.Add(p.out_channels, 1);
  dnnl_status_t status = Describe(box, OnednnType(array->type), &array->desc);
  array->bytes = Library().memory_desc_get_size(array->desc);
  array->moved = array->type != p.result;
  if (status || !array->moved) return status;
  status = Describe(box, OnednnType(p.result), &array->move.from);
  if (!status) status = Describe(box, OnednnType(array->type), &array->move.to);
  if (!status) status = array->move.Make();
  return status;
}

// w is known once the library has chosen its order.
dnnl_status_t MakeWeights(const ConvProblem& p, DType user_type, bool result,
                          const_dnnl_memory_desc_t chosen, Array* array) {
  const Onednn& dnnl = Library();
  MemoryDesc user;
  dnnl_status_t status = dnnl.memory_desc_clone(array->desc.out(), chosen);
  if (!status) {
    status = Describe(WeightsBox(p), OnednnType(user_type), &user);
  }
  if (status) return status;
  array->bytes = dnnl.memory_desc_get_size(array->desc);
  array->moved = !dnnl.memory_desc_equal(array->desc, user);
  if (!array->moved) return status;
  (result ? array->move.to : array->move.from) = std::move(user);
  MemoryDesc& mine = result ? array->move.from : array->move.to;
  status = dnnl.memory_desc_clone(mine.out(), array->desc);
  if (!status) status = array->move.Make();
  return status;
}

bool Slow(const std::string& implementation) {
  return implementation.starts_with("ref") ||
         implementation.find("gemm") != std::string::npos;
}

// `weights`: their order, null to let the library choose.
dnnl_status_t MakeConvolution(const ConvProblem& p, const Way& way,
                              const_dnnl_memory_desc_t weights,
                              Convolution* conv) {
  const Onednn& dnnl = Library();
  conv->problem = p;
  const ArrayId result = ResultId(p.pass);
  const DType in = way.widened ? DType::kF32 : p.type;
  // Partial sums of w are added before they are rounded.
  const bool wide = way.widened || p.pass == ConvPass::kWeightGrad;
  const DType out = wide && p.type != DType::kS8 ? DType::kF32 : p.result;
  dnnl_status_t status = dnnl_success;
  for (ArrayId id : {kX, kW, kY, kBias}) {
    conv->arrays[id].type = id == result || id == kBias ? out : in;
  }
  Array& x = conv->arrays[kX];
  Array& w = conv->arrays[kW];
  Array& y = conv->arrays[kY];
  Array& bias = conv->arrays[kBias];
  const auto user_type = [&](ArrayId id) {
    return id == result ? p.result : p.type;
  };
  for (ArrayId id : {kX, kY}) {
    if (!status) {
      status = MakeActivation(p, id, way, user_type(id), id == result,
                              &conv->arrays[id]);
    }
  }
  if (!status) status = MakeVector(p, &bias);
  if (status) return status;

  MemoryDesc any;
  if (weights == nullptr) {
    const Box box = WeightsBox(p);
    status = dnnl.memory_desc_create_with_tag(
        any.out(), box.rank, box.dims, OnednnType(w.type), dnnl_format_tag_any);
    weights = any;
  }
  dnnl_dims_t stride, dilation, low, high;
  const int first = FirstAxis(p);
  for (int i = first; i < 3; ++i) {
    stride[i - first] = p.stride[i];
    dilation[i - first] = p.dilation[i] - 1;
    low[i - first] = p.pad_low[i];
    high[i - first] = p.pad_high[i];
  }
  Attr attr;
  PrimitiveDesc hint, desc;
  if (!status) status = MakeAttr(&attr);
  constexpr dnnl_alg_kind_t kDirect = dnnl_convolution_direct;
  if (!status && p.pass == ConvPass::kForward) {
    status = dnnl.convolution_forward_primitive_desc_create(
        desc.out(), dnnl.engine, dnnl_forward_inference, kDirect, x.desc,
        weights, bias.desc, y.desc, stride, dilation, low, high, attr);
  } else if (!status && p.pass == ConvPass::kInputGrad) {
    status = dnnl.convolution_backward_data_primitive_desc_create(
        desc.out(), dnnl.engine, kDirect, x.desc, weights, y.desc, stride,
        dilation, low, high, nullptr, attr);
  } else if (!status) {
    status = dnnl.convolution_backward_weights_primitive_desc_create(
        desc.out(), dnnl.engine, kDirect, x.desc, weights, nullptr, y.desc,
        stride, dilation, low, high, nullptr, attr);
  }
  if (status) return status;
  const char* implementation = "";
  status = dnnl.primitive_desc_query(desc, dnnl_query_impl_info_str, 0,
                                     &implementation);
  conv->implementation = implementation;
  if (!status && !way.any && Slow(conv->implementation)) {
    status = dnnl_unimplemented;
  }
  if (!status) {
    status = MakeWeights(
        p, user_type(kW), result == kW,
        dnnl.primitive_desc_query_md(
            desc,
            result == kW ? dnnl_query_diff_weights_md : dnnl_query_weights_md,
            0),
        &w);
  }
  if (!status) status = conv->scratchpad.Make(desc);
  if (!status) status = dnnl.primitive_create(conv->primitive.out(), desc);
  return status;
}

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
};

int64_t Begin(const ConvPart& part, ArrayId id) {
  return id == kX ? part.x : id == kW ? part.w : id == kY ? part.y : part.bias;
}

DType UserType(const ConvProblem& p, ArrayId id) {
  return id == ResultId(p.pass) || id == kBias ? p.result : p.type;
}

bool SameShape(const ConvProblem& a, const ConvProblem& b) {
  return a.batch == b.batch && a.groups == b.groups &&
         a.in_channels == b.in_channels && a.out_channels == b.out_channels &&
         a.in == b.in && a.out == b.out && a.pad_low == b.pad_low &&
         a.pad_high == b.pad_high;
}

// The extents of an array along an axis of the library, cut for the threads.
constexpr int64_t kPieceBytes = 1 << 18;
constexpr int64_t kPieceChannels = 64;  // no block has more

// Cuts the move of an array that all tasks share into pieces.
dnnl_status_t MakePieces(const ConvProblem& p, const Array& array, ArrayId id,
                         std::vector<Piece>* pieces) {
  const Onednn& dnnl = Library();
  const bool result = id == ResultId(p.pass);
  const MemoryDesc& whole = result ? array.move.from : array.move.to;
  const Activation activation = ActivationOf(p, id == kW ? kX : id);
  const Box box = id == kW ? WeightsBox(p) : UserBox(activation);
  // Along the outermost axis of the library's order, about.
  int axis = 0;
  int64_t unit = 1;
  if (id == kW && p.groups == 1) {
    axis = p.pass == ConvPass::kInputGrad ? 1 : 0;
    unit = kPieceChannels;
  } else if (id == kW) {
    unit = 16;
  } else {
    while (axis < box.rank - 1 && box.dims[axis] == 1) ++axis;
    if (axis == 1 && activation.layout.block == 1) axis = 2;
  }
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

dnnl_status_t MakePlan(const ConvProblem& p, const Way& way,
                       const ConvTiling& tiling, Plan* plan) {
  const Onednn& dnnl = Library();
  *plan = {};
  plan->problem = p;
  const bool one_w = tiling.channels == tiling.all_channels;
  dnnl_status_t status = MakeTasks(p, way, tiling, one_w, plan);
  if (status) return status;

  const ArrayId result = ResultId(p.pass);
  plan->slots = std::min<int64_t>(plan->tasks.size(), ProcessorCount());
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
    MemoryDesc user;
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
  constexpr int kArguments[3][4] = {
      {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
      {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST, 0},
      {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST, 0}};
  Call call;
  for (ArrayId id : {kX, kW, kY, kBias}) {
    if (!conv.arrays[id].used) continue;
    call.Bind(kArguments[static_cast<int>(p.pass)][id], conv.arrays[id].desc,
              library[id]);
  }
  call.Bind(DNNL_ARG_SCRATCHPAD, conv.scratchpad.desc, scratchpad);
  status = call.Run(conv.primitive);
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
  std::unique_ptr<char, decltype(&std::free)> own(nullptr, &std::free);
  char* memory = static_cast<char*>(buffers.workspace);
  if (buffers.workspace_bytes < plan.bytes) {
    own.reset(
        static_cast<char*>(std::aligned_alloc(kAlign, Pages(plan.bytes + 1))));
    memory = own.get();
    if (memory == nullptr) return Failure(dnnl_out_of_memory);
  }
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

// So many products are worth waking up a thread, which takes about 50 us.
constexpr int64_t kMinProducts = int64_t{1} << 22;
constexpr int64_t kTasksPerThread = 4;

// Cuts images first, then rows, then channels.
ConvTiling ChooseTiling(const ConvProblem& p, const Way& way) {
  ConvTiling t = WholeConv(p);
  const int64_t weights =
      p.out_channels * (p.in_channels / p.groups) * ConvProduct(p.kernel);
  const int64_t products = p.batch * ConvProduct(p.out) * weights;
  const int64_t wanted = std::min<int64_t>(kTasksPerThread * ProcessorCount(),
                                           products / kMinProducts);
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
  // Whole groups, or what the library has in a block.
  const int64_t unit =
      p.groups > 1 ? t.all_channels / p.groups
                   : std::max<int64_t>(32, std::max(p.x.block, p.y.block));
  const int64_t left = CeilDiv(wanted, t.Count());
  t.channels = std::min(CeilDiv(CeilDiv(t.all_channels, left), unit) * unit,
                        t.all_channels);
  return t;
}

}  // namespace

Status ChooseOnednnConv(const ConvProblem& p, ConvKernel* kernel) {
  if (!Library().loaded()) return Status::Error("oneDNN is not there");
  const OnednnSequential sequential;
  const bool wide_types = ItemSize(p.type) == 2;
  std::vector<Way> ways;
  // Where both are in blocks, f32 kernels read them as they are; those of 16
  // bits want channels innermost.
  const int64_t block = p.x.block == p.y.block ? p.x.block : 1;
  if (p.type == DType::kF32 && (block == 8 || block == 16)) {
    ways.push_back({.block = block});
  }
  ways.push_back({});
  if (wide_types) ways.push_back({.widened = true});
  ways.push_back({.any = true});
  if (wide_types) ways.push_back({.widened = true, .any = true});
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
  kernel->implementation = "oneDNN " + plan->convolutions[0].implementation;
  kernel->run = [plan](const ConvBuffers& buffers, const Executor& executor) {
    return Run(*plan, buffers, executor);
  };
  return Status::Ok();
}

}  // namespace jax_layout

#else  // built without its headers

namespace jax_layout {

Status ChooseOnednnConv(const ConvProblem&, ConvKernel*) {
  return Status::Error("built without oneDNN");
}

}  // namespace jax_layout
#endif
