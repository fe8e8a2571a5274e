// SPDX-License-Identifier: Apache-2.0
#if __has_include(<oneapi/dnnl/dnnl.h>)
#include "cpu/conv/onednn/primitive.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cpu/conv/parts.h"

namespace jax_layout::onednn {
namespace {

const Onednn& Library() { return OnednnLibrary(); }

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
Box UserActivationBox(const Activation& a) {
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
  if (!p.w_format.empty()) {
    return WeightsFormat(p, array->desc) == p.w_format &&
                   user_type == array->type
               ? dnnl_success
               : dnnl_unimplemented;
  }
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

// With AMX, versions before 3.13 read rows of x into a buffer that is too small
// for steps longer than the kernel, and sum what they wrote over it (oneDNN's
// pull request 5494); some sum one column wrongly where columns have steps
// (PyTorch's pull request 188426). Where AVX-512 has no bfloat16, sums of five
// points by five blocks of channels take registers that its emulation needs.
bool Wrong(const ConvProblem& p, const std::string& implementation) {
  if (implementation == "jit_bf16_1x1:avx512_core") {
    return ConvProduct(p.out) == 5;
  }
  const bool steps = p.stride[0] > p.kernel[0] || p.stride[1] > p.kernel[1];
  const bool column = p.out[2] == 1 && p.stride[2] > 1;
  return p.pass == ConvPass::kForward && (steps || column) &&
         implementation.find("amx") != std::string::npos &&
         implementation.find("1x1") == std::string::npos;
}

}  // namespace

std::string WeightsFormat(const ConvProblem& p, const_dnnl_memory_desc_t desc) {
  const Onednn& dnnl = Library();
  if (p.groups > 1) return "";
  int blocks = 0;
  dnnl_dims_t *dims = nullptr, *padded = nullptr, *strides = nullptr;
  dnnl_dims_t *sizes = nullptr, *axes = nullptr;
  dnnl.memory_desc_query(desc, dnnl_query_dims, &dims);
  dnnl.memory_desc_query(desc, dnnl_query_padded_dims, &padded);
  dnnl.memory_desc_query(desc, dnnl_query_strides, &strides);
  dnnl.memory_desc_query(desc, dnnl_query_inner_nblks_s32, &blocks);
  dnnl.memory_desc_query(desc, dnnl_query_inner_blks, &sizes);
  dnnl.memory_desc_query(desc, dnnl_query_inner_idxs, &axes);
  const int first = FirstAxis(p);
  const int rank = 5 - first;
  dnnl_dims_t outer = {};
  for (int i = 0; i < rank; ++i) {
    if ((*dims)[i] != (*padded)[i]) return "";
    outer[i] = (*dims)[i];
  }
  std::string inner;
  int64_t dense = 1;
  for (int i = 0; i < blocks; ++i) {
    outer[(*axes)[i]] /= (*sizes)[i];
    dense *= (*sizes)[i];
    inner += std::to_string((*sizes)[i]) + "oi"[(*axes)[i]];
  }
  std::string name = first == 0 ? "" : "D";  // of size 1: it may stand anywhere
  std::vector<int> order(rank);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return (*strides)[a] > (*strides)[b]; });
  const std::string letters = first == 0 ? "OIDHW" : "OIHW";
  for (int i = rank - 1; i >= 0; --i) {
    if (outer[order[i]] > 1 && (*strides)[order[i]] != dense) return "";
    dense *= outer[order[i]];
  }
  for (int axis : order) name += letters[axis];
  return name + inner;
}

ArrayId ResultId(ConvPass pass) {
  return pass == ConvPass::kForward     ? kY
         : pass == ConvPass::kInputGrad ? kX
                                        : kW;
}

DType UserType(const ConvProblem& p, ArrayId id) {
  return id == ResultId(p.pass) || id == kBias ? p.result : p.type;
}

Box UserBox(const ConvProblem& p, ArrayId id) {
  return id == kW ? WeightsBox(p) : UserActivationBox(ActivationOf(p, id));
}

dnnl_status_t Describe(const Box& box, dnnl_data_type_t type,
                       MemoryDesc* desc) {
  return Library().memory_desc_create_with_strides(desc->out(), box.rank,
                                                   box.dims, type, box.strides);
}

dnnl_status_t Scratchpad::Make(const_dnnl_primitive_desc_t primitive) {
  const Onednn& dnnl = Library();
  bytes = dnnl.memory_desc_get_size(
      dnnl.primitive_desc_query_md(primitive, dnnl_query_scratchpad_md, 0));
  const dnnl_dims_t dims = {bytes}, dense = {1};
  return dnnl.memory_desc_create_with_strides(desc.out(), 1, dims, dnnl_u8,
                                              dense);
}

dnnl_status_t Move::Make() {
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

dnnl_status_t Move::Run(const void* source, void* target, void* memory) const {
  Call call;
  call.Bind(DNNL_ARG_FROM, from, source);
  call.Bind(DNNL_ARG_TO, to, target);
  call.Bind(DNNL_ARG_SCRATCHPAD, scratchpad.desc, memory);
  return call.Run(primitive);
}

dnnl_status_t MakeActivation(const ConvProblem& p, ArrayId id, const Way& way,
                             DType user_type, bool result, Array* array) {
  const Onednn& dnnl = Library();
  const Activation a = ActivationOf(p, id);
  const Box user = UserActivationBox(a);
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

dnnl_status_t MakeConvolution(const ConvProblem& p, const Way& way,
                              const_dnnl_memory_desc_t weights,
                              Convolution* conv) {
  const Onednn& dnnl = Library();
  conv->problem = p;
  const ArrayId result = ResultId(p.pass);
  const DType in = p.type;
  // Partial sums of w are added before they are rounded.
  const bool wide = p.pass == ConvPass::kWeightGrad;
  const DType out = wide && p.type != DType::kS8 ? DType::kF32 : p.result;
  dnnl_status_t status = dnnl_success;
  for (ArrayId id : {kX, kW, kY, kBias}) {
    conv->arrays[id].type = id == result || id == kBias ? out : in;
  }
  Array& x = conv->arrays[kX];
  Array& w = conv->arrays[kW];
  Array& y = conv->arrays[kY];
  Array& bias = conv->arrays[kBias];
  for (ArrayId id : {kX, kY}) {
    if (!status) {
      status = MakeActivation(p, id, way, UserType(p, id), id == result,
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
  if (!status && ((!way.any && Slow(conv->implementation)) ||
                  Wrong(p, conv->implementation))) {
    status = dnnl_unimplemented;
  }
  if (!status) {
    status = MakeWeights(
        p, UserType(p, kW), result == kW,
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

dnnl_status_t RunConvolution(const Convolution& conv,
                             const std::array<char*, kArrays>& data,
                             char* scratchpad) {
  constexpr int kArguments[3][kArrays] = {
      {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
      {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST, 0},
      {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST, 0}};
  Call call;
  for (ArrayId id : {kX, kW, kY, kBias}) {
    if (!conv.arrays[id].used) continue;
    call.Bind(kArguments[static_cast<int>(conv.problem.pass)][id],
              conv.arrays[id].desc, data[id]);
  }
  call.Bind(DNNL_ARG_SCRATCHPAD, conv.scratchpad.desc, scratchpad);
  return call.Run(conv.primitive);
}

}  // namespace jax_layout::onednn

#endif
