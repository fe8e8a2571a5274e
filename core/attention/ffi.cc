// SPDX-License-Identifier: Apache-2.0
//
// The FFI targets "jax_layout_attention" and "jax_layout_attention_backward",
// on CPUs. The second has the gradient of y before the operands below, y and
// sums after them, and gradients of q, k and v as results, then, if so told, of
// the bias.
//
//   operands  q, k, v of one dtype; then, as attributes say,
//             bias            (bias) float, 5-D: batch, heads, groups, queries
//             mask            (mask) bool, and keys, 1 where it is broadcast
//             query_lengths, key_lengths  int32, one for each of the batch
//             block_tables    (block_tables, of the first alone) int32, 2-D:
//                             batch, and where k and v have each block of keys
//   results   y, shaped as q; sums, float32: batch, heads, groups, queries, and
//             the two of RowSum
//   q_axes    int64[5]: where q has its batch, queries, heads, groups, features
//   k_axes    int64[4]: where k and v have their batch, keys, heads, features;
//             with tables, blocks and the keys of a block
//   scale     float64
//   causal    bool
//   bias_gradient  bool, of the second alone
//   window    int64[2]: keys seen before and after a query, -1 for all
#include <algorithm>
#include <optional>
#include <utility>

#include "attention/attention.h"  // the backend's
#include "core/registry.h"
#include "platform.h"  // the backend's

namespace jax_layout {
namespace {

std::optional<DType> TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return DType::kF32;
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F16:
      return DType::kF16;
    default:
      return std::nullopt;
  }
}

// An array's extents and strides, in the order that `axes` gives.
struct Axes {
  int64_t extent[5] = {}, stride[5] = {};
};

bool ReadAxes(const ffi::AnyBuffer& buffer, ffi::Span<const int64_t> axes,
              Axes* out) {
  const auto shape = buffer.dimensions();
  if (shape.size() != axes.size() || axes.size() > 5) return false;
  unsigned seen = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t axis = axes[i];
    if (axis < 0 || axis >= static_cast<int64_t>(shape.size())) return false;
    seen |= 1u << axis;
    out->extent[i] = shape[axis];
    out->stride[i] = 1;
    for (size_t d = axis + 1; d < shape.size(); ++d) out->stride[i] *= shape[d];
  }
  return seen == (1u << axes.size()) - 1;
}

// Of an array that broadcasts to the scores.
bool ReadScores(const ffi::AnyBuffer& buffer, const AttentionProblem& p,
                ScoreArray* out) {
  const auto shape = buffer.dimensions();
  const int64_t extents[] = {p.batch, p.heads, p.groups, p.queries, p.keys};
  int64_t* const strides[] = {&out->batch, &out->head, &out->group, &out->query,
                              &out->key};
  if (shape.size() != 5) return false;
  int64_t stride = 1;
  for (int d = 4; d >= 0; --d) {
    if (shape[d] != extents[d] && shape[d] != 1) return false;
    *strides[d] = shape[d] == 1 ? 0 : stride;
    stride *= shape[d];
  }
  out->present = true;
  return true;
}

bool ReadLengths(const ffi::AnyBuffer& buffer, int64_t batch,
                 const int32_t** out) {
  *out = static_cast<const int32_t*>(buffer.untyped_data());
  return buffer.element_type() == ffi::S32 &&
         static_cast<int64_t>(buffer.element_count()) == batch;
}

struct Flags {
  bool bias, mask, query_lengths, key_lengths, block_tables = false;
};

bool ReadTables(const ffi::AnyBuffer& tables, AttentionProblem* p,
                const int32_t** out) {
  const auto shape = tables.dimensions();
  *out = static_cast<const int32_t*>(tables.untyped_data());
  if (shape.size() != 2 || shape[0] != p->batch || p->keys < 1 ||
      p->blocks < 1 || tables.element_type() != ffi::S32) {
    return false;
  }
  p->block = p->keys;
  p->keys *= shape[1];
  return true;
}

Status ReadProblem(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
                   const ffi::AnyBuffer& v, const ffi::RemainingArgs& rest,
                   const Flags& has, ffi::Span<const int64_t> q_axes,
                   ffi::Span<const int64_t> k_axes, double scale, bool causal,
                   ffi::Span<const int64_t> window, AttentionProblem* p,
                   AttentionBuffers* buffers) {
  const auto type = TypeOf(q.element_type());
  Axes queries, keys;
  if (!type || k.element_type() != q.element_type() ||
      v.element_type() != q.element_type() || q_axes.size() != 5 ||
      k_axes.size() != 4 || window.size() != 2 ||
      !ReadAxes(q, q_axes, &queries) || !ReadAxes(k, k_axes, &keys) ||
      v.dimensions().size() != 4 ||
      !std::equal(k.dimensions().begin(), k.dimensions().end(),
                  v.dimensions().begin())) {
    return Status::Error(
        "attention: q must have 5 axes, k and v 4, all one dtype.");
  }
  p->type = *type;
  p->batch = queries.extent[0];
  p->queries = queries.extent[1];
  p->heads = queries.extent[2];
  p->groups = queries.extent[3];
  p->features = queries.extent[4];
  p->keys = keys.extent[1];
  p->blocks = keys.extent[0];
  if ((keys.extent[0] != p->batch && !has.block_tables) ||
      keys.extent[2] != p->heads || keys.extent[3] != p->features ||
      queries.stride[4] != 1 || keys.stride[3] != 1) {
    return Status::Error(
        "attention: batch, heads and features must be those of q, the last "
        "contiguous.");
  }
  p->q = {queries.stride[0], queries.stride[1], queries.stride[2],
          queries.stride[3]};
  p->y = p->q;
  p->k = {keys.stride[0], keys.stride[1], keys.stride[2], 0};
  p->v = p->k;
  p->scale = static_cast<float>(scale);
  p->causal = causal;
  p->left = window[0];
  p->right = window[1];
  buffers->q = q.untyped_data();
  buffers->k = k.untyped_data();
  buffers->v = v.untyped_data();
  const size_t given = static_cast<size_t>(has.bias) + has.mask +
                       has.query_lengths + has.key_lengths + has.block_tables;
  if (rest.size() < given) {
    return Status::Error("attention: an operand is missing.");
  }
  size_t at = 0;
  bool fit = true;
  if (has.block_tables) {  // they say how many keys there are
    fit = ReadTables(*rest.get<ffi::AnyBuffer>(given - 1), p,
                     &buffers->block_tables);
  }
  if (has.bias) {
    const auto bias = *rest.get<ffi::AnyBuffer>(at++);
    const auto bias_type = TypeOf(bias.element_type());
    fit = fit && bias_type && ReadScores(bias, *p, &p->bias);
    if (bias_type) p->bias.type = *bias_type;
    buffers->bias = bias.untyped_data();
  }
  if (has.mask) {
    const auto mask = *rest.get<ffi::AnyBuffer>(at++);
    fit = fit && mask.element_type() == ffi::PRED &&
          ReadScores(mask, *p, &p->mask);
    buffers->mask = static_cast<const uint8_t*>(mask.untyped_data());
  }
  if (has.query_lengths) {
    fit = fit && ReadLengths(*rest.get<ffi::AnyBuffer>(at++), p->batch,
                             &buffers->query_lengths);
  }
  if (has.key_lengths) {
    fit = fit && ReadLengths(*rest.get<ffi::AnyBuffer>(at++), p->batch,
                             &buffers->key_lengths);
  }
  return fit ? Status::Ok()
             : Status::Error(
                   "attention: a bias, a mask, lengths or tables do not fit q "
                   "and k.");
}

bool AreSums(const ffi::AnyBuffer& buffer, const AttentionProblem& p) {
  return buffer.element_type() == ffi::F32 &&
         static_cast<int64_t>(buffer.size_bytes()) ==
             p.Rows() * static_cast<int64_t>(sizeof(RowSum));
}

ffi::Error Forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                   ffi::AnyBuffer v, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> sums, bool bias, bool mask,
                   bool query_lengths, bool key_lengths,
                   ffi::Span<const int64_t> q_axes,
                   ffi::Span<const int64_t> k_axes, double scale, bool causal,
                   ffi::Span<const int64_t> window, bool block_tables) {
  AttentionProblem problem;
  AttentionBuffers buffers;
  const Status status = ReadProblem(
      q, k, v, rest, {bias, mask, query_lengths, key_lengths, block_tables},
      q_axes, k_axes, scale, causal, window, &problem, &buffers);
  if (!status.ok()) return ToError(status);
  if (y->element_type() != q.element_type() ||
      y->element_count() != q.element_count() || !AreSums(*sums, problem)) {
    return ffi::Error::InvalidArgument(
        "attention: the results must be shaped as q and its rows.");
  }
  buffers.y = y->untyped_data();
  buffers.sums = static_cast<RowSum*>(sums->untyped_data());
  return ToError(Attention(problem, buffers, ToExecutor(pool)));
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::AnyBuffer q,
                    ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::RemainingRets more,
                    bool bias, bool mask, bool query_lengths, bool key_lengths,
                    ffi::Span<const int64_t> q_axes,
                    ffi::Span<const int64_t> k_axes, double scale, bool causal,
                    ffi::Span<const int64_t> window, bool bias_gradient) {
  AttentionProblem problem;
  AttentionGradientBuffers buffers;
  const Status status = ReadProblem(
      q, k, v, rest, {bias, mask, query_lengths, key_lengths}, q_axes, k_axes,
      scale, causal, window, &problem, &buffers.forward);
  if (!status.ok()) return ToError(status);
  const size_t given =
      static_cast<size_t>(bias) + mask + query_lengths + key_lengths;
  if (rest.size() != given + 2) {
    return ffi::Error::InvalidArgument(
        "attention: gradients need the result and its sums.");
  }
  const auto y = *rest.get<ffi::AnyBuffer>(given);
  const auto sums = *rest.get<ffi::AnyBuffer>(given + 1);
  const auto like = [](const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
    return a.element_type() == b.element_type() &&
           a.element_count() == b.element_count();
  };
  if (!like(y, q) || !like(dy, q) || !like(*dq, q) || !like(*dk, k) ||
      !like(*dv, v) || !AreSums(sums, problem)) {
    return ffi::Error::InvalidArgument(
        "attention: gradients must be shaped as what they are of.");
  }
  buffers.forward.y = y.untyped_data();
  buffers.forward.sums = static_cast<RowSum*>(sums.untyped_data());
  buffers.dy = dy.untyped_data();
  buffers.dq = dq->untyped_data();
  buffers.dk = dk->untyped_data();
  buffers.dv = dv->untyped_data();
  if (bias_gradient) {
    if (!bias || more.size() != 1 ||
        !like(**more.get<ffi::AnyBuffer>(0), *rest.get<ffi::AnyBuffer>(0))) {
      return ffi::Error::InvalidArgument(
          "attention: the gradient of the bias must be shaped as it.");
    }
    buffers.dbias = (*more.get<ffi::AnyBuffer>(0))->untyped_data();
  }
  return ToError(AttentionGradient(problem, buffers, ToExecutor(pool)));
}

// What both calls are told beside their arrays.
template <typename Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<bool>("bias")
      .template Attr<bool>("mask")
      .template Attr<bool>("query_lengths")
      .template Attr<bool>("key_lengths")
      .template Attr<ffi::Span<const int64_t>>("q_axes")
      .template Attr<ffi::Span<const int64_t>>("k_axes")
      .template Attr<double>("scale")
      .template Attr<bool>("causal")
      .template Attr<ffi::Span<const int64_t>>("window");
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward,
                       WithAttributes(ffi::Ffi::Bind()
                                          .Ctx<ffi::ThreadPool>()
                                          .Arg<ffi::AnyBuffer>()  // q
                                          .Arg<ffi::AnyBuffer>()  // k
                                          .Arg<ffi::AnyBuffer>()  // v
                                          .RemainingArgs()
                                          .Ret<ffi::AnyBuffer>()   // y
                                          .Ret<ffi::AnyBuffer>())  // sums
                           .Attr<bool>("block_tables"));

XLA_FFI_DEFINE_HANDLER(kBackward, Backward,
                       WithAttributes(ffi::Ffi::Bind()
                                          .Ctx<ffi::ThreadPool>()
                                          .Arg<ffi::AnyBuffer>()  // dy
                                          .Arg<ffi::AnyBuffer>()  // q
                                          .Arg<ffi::AnyBuffer>()  // k
                                          .Arg<ffi::AnyBuffer>()  // v
                                          .RemainingArgs()
                                          .Ret<ffi::AnyBuffer>()  // dq
                                          .Ret<ffi::AnyBuffer>()  // dk
                                          .Ret<ffi::AnyBuffer>()  // dv
                                          .RemainingRets())       // dbias
                           .Attr<bool>("bias_gradient"));

JAX_LAYOUT_REGISTER_STATELESS(attention, kForward);
JAX_LAYOUT_REGISTER_STATELESS(attention_backward, kBackward);

}  // namespace
}  // namespace jax_layout
