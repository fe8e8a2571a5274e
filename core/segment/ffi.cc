// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_segment_extreme", on CPUs: the largest, or
// smallest, of the rows that share an index.
//
//   operands  index, int32 or int64, whose leading axes are source's; source
//   result    y, source with as many rows as are wanted at `axis`; those that
//             no index names hold the dtype's least number (its greatest)
//   axis      int64
//   clip      bool: an index out of range is the nearest in range, else none;
//             negative ones are out of range
//   least     bool: the smallest
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

std::optional<SumType> TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return SumType::kF32;
    case ffi::F64:
      return SumType::kF64;
    case ffi::BF16:
      return SumType::kBF16;
    case ffi::F16:
      return SumType::kF16;
    case ffi::S8:
      return SumType::kI8;
    case ffi::S16:
      return SumType::kI16;
    case ffi::S32:
      return SumType::kI32;
    case ffi::S64:
      return SumType::kI64;
    case ffi::PRED:
    case ffi::U8:
      return SumType::kU8;
    case ffi::U16:
      return SumType::kU16;
    case ffi::U32:
      return SumType::kU32;
    case ffi::U64:
      return SumType::kU64;
    default:
      return std::nullopt;
  }
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer index,
                   ffi::AnyBuffer source, ffi::Result<ffi::AnyBuffer> y,
                   int64_t axis, bool clip, bool least) {
  const auto kind = index.element_type();
  const std::optional<SumType> type = TypeOf(y->element_type());
  if ((kind != ffi::S32 && kind != ffi::S64) || !type ||
      source.element_type() != y->element_type()) {
    return ffi::Error::InvalidArgument(
        "segment_extreme: indices must be int32 or int64, the rest of one "
        "ordered dtype.");
  }
  IndexPlan plan;
  const Status status = MakeIndexPlan(
      Shape(*y), Shape(index), Shape(source), axis,
      static_cast<int64_t>(ffi::ByteWidth(y->element_type())), &plan);
  if (!status.ok()) return ToError(status);
  plan.wide = kind == ffi::S64;
  plan.clip = clip;
  plan.wrap = false;
  if (y->element_count() == 0) return ffi::Error::Success();
  return ToError(IndexReduce(plan, least ? Reduction::kMin : Reduction::kMax,
                             *type, index.untyped_data(), source.untyped_data(),
                             nullptr, y->untyped_data(), ToExecutor(pool)));
}

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // index
                           .Arg<ffi::AnyBuffer>()  // source
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("axis")
                           .Attr<bool>("clip")
                           .Attr<bool>("least"));

JAX_LAYOUT_REGISTER_STATELESS(segment_extreme, kExecute);

}  // namespace
}  // namespace jax_layout
