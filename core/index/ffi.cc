// SPDX-License-Identifier: Apache-2.0
//
// The FFI targets "jax_layout_index_select" and "jax_layout_index_add".
//
//   index_select
//     operands  x; index, int32 or int64, whose leading axes are x's
//     result    y: x with index's last extent at `axis`
//     fill      uint8[itemsize], an element for indices out of range
//
//   index_add
//     operands  index; source, shaped as y above; then, as attributes say,
//     order     (sorted) int32, index's shape: where the sorted indices were
//     x         (keep) what is added to, perhaps aliased to the result; else
//     zero result    x plus the rows of source at their indices
//
//   axis  int64
//   clip  bool: an index out of range is the nearest in range, else nothing
//   wrap  bool: negative indices count from the end
#include <optional>

#include "core/index/plan.h"
#include "core/registry.h"
#include "index/index.h"  // the backend's
#include "platform.h"     // the backend's

namespace jax_layout {
namespace {

std::span<const int64_t> Shape(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  return {shape.begin(), shape.size()};
}

Status Plan(const char* name, const ffi::AnyBuffer& whole,
            const ffi::AnyBuffer& index, const ffi::AnyBuffer& selected,
            int64_t axis, bool clip, bool wrap, IndexPlan* plan) {
  const auto type = index.element_type();
  if ((type != ffi::S32 && type != ffi::S64) ||
      whole.element_type() != selected.element_type()) {
    return Status::Error(std::string(name) +
                         ": indices must be int32 or int64, the rest of one "
                         "dtype.");
  }
  Status status = MakeIndexPlan(
      Shape(whole), Shape(index), Shape(selected), axis,
      static_cast<int64_t>(ffi::ByteWidth(whole.element_type())), plan);
  plan->wide = type == ffi::S64;
  plan->clip = clip;
  plan->wrap = wrap;
  return status;
}

std::optional<SumType> SumTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
    case ffi::C64:
      return SumType::kF32;
    case ffi::F64:
    case ffi::C128:
      return SumType::kF64;
    case ffi::BF16:
      return SumType::kBF16;
    case ffi::F16:
      return SumType::kF16;
    case ffi::S8:
    case ffi::U8:
      return SumType::kI8;
    case ffi::S16:
    case ffi::U16:
      return SumType::kI16;
    case ffi::S32:
    case ffi::U32:
      return SumType::kI32;
    case ffi::S64:
    case ffi::U64:
      return SumType::kI64;
    default:
      return std::nullopt;
  }
}

ffi::Error Select(ExecutorContext::Type context, ffi::AnyBuffer x,
                  ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> y,
                  int64_t axis, bool clip, bool wrap,
                  ffi::Span<const uint8_t> fill) {
  IndexPlan plan;
  Status status = Plan("index_select", x, index, *y, axis, clip, wrap, &plan);
  if (!status.ok()) return ToError(status);
  if (static_cast<int64_t>(fill.size()) != plan.itemsize ||
      plan.itemsize > 16) {
    return ffi::Error::InvalidArgument(
        "index_select: fill must be one element of x.");
  }
  if (y->element_count() == 0) return ffi::Error::Success();
  if (plan.extent == 0) {
    return ffi::Error::InvalidArgument("index_select: the axis is empty.");
  }
  return ToError(IndexSelect(plan, x.untyped_data(), index.untyped_data(),
                             fill.begin(), y->untyped_data(),
                             ToExecutor(context)));
}

ffi::Error Add(ExecutorContext::Type context, ffi::AnyBuffer index,
               ffi::AnyBuffer source, ffi::RemainingArgs rest,
               ffi::Result<ffi::AnyBuffer> y, int64_t axis, bool clip,
               bool wrap, bool sorted, bool keep) {
  IndexPlan plan;
  Status status = Plan("index_add", *y, index, source, axis, clip, wrap, &plan);
  if (!status.ok()) return ToError(status);
  const std::optional<SumType> type = SumTypeOf(y->element_type());
  if (!type || rest.size() != static_cast<size_t>(sorted) + keep) {
    return ffi::Error::InvalidArgument(
        "index_add: unsupported dtype or number of operands.");
  }
  const void* order = nullptr;
  if (sorted) {
    const auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (!buffer || buffer->element_type() != ffi::S32 ||
        buffer->element_count() != index.element_count()) {
      return ffi::Error::InvalidArgument(
          "index_add: order must be int32 of index's shape.");
    }
    order = buffer->untyped_data();
  }
  const void* x = nullptr;
  if (keep) {
    const auto buffer = rest.get<ffi::AnyBuffer>(sorted);
    if (!buffer || buffer->element_type() != y->element_type() ||
        buffer->element_count() != y->element_count()) {
      return ffi::Error::InvalidArgument(
          "index_add: x must be shaped as the result.");
    }
    x = buffer->untyped_data();
  }
  if (y->element_type() == ffi::C64 || y->element_type() == ffi::C128) {
    plan.inner *= 2;
    plan.itemsize /= 2;
  }
  if (y->element_count() == 0) return ffi::Error::Success();
  return ToError(IndexAdd(
      plan, *type, index.untyped_data(), static_cast<const int32_t*>(order),
      source.untyped_data(), x, y->untyped_data(), ToExecutor(context)));
}

XLA_FFI_DEFINE_HANDLER(kSelect, Select,
                       ffi::Ffi::Bind()
                           .Ctx<ExecutorContext::Tag>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // index
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("axis")
                           .Attr<bool>("clip")
                           .Attr<bool>("wrap")
                           .Attr<ffi::Span<const uint8_t>>("fill"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAdd, Add,
                       ffi::Ffi::Bind()
                           .Ctx<ExecutorContext::Tag>()
                           .Arg<ffi::AnyBuffer>()  // index
                           .Arg<ffi::AnyBuffer>()  // source
                           .RemainingArgs()        // order, x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("axis")
                           .Attr<bool>("clip")
                           .Attr<bool>("wrap")
                           .Attr<bool>("sorted")
                           .Attr<bool>("keep"),
                       {ffi::Traits::kCmdBufferCompatible});

JAX_LAYOUT_REGISTER_STATELESS(index_select, kSelect);
JAX_LAYOUT_REGISTER_STATELESS(index_add, kAdd);

}  // namespace
}  // namespace jax_layout
