// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_permute".
//
//   operand  x of any dtype of whole bytes, row-major
//   result   y, same dtype, row-major
//   shape    int64[rank], the extents of x
//   axes     int64[rank]; y's axis i is x's axis axes[i]
//   itemsize int64, bytes of an element
#include <memory>

#include "core/permute/plan.h"
#include "core/registry.h"
#include "permute/permute.h"  // the backend's
#include "platform.h"         // the backend's

namespace jax_layout {
namespace {

struct PermuteState {
  static constexpr char kName[] = "jax_layout_permute";
  static ffi::TypeId id;
  PermuteKernel kernel;
};
ffi::TypeId PermuteState::id = XLA_FFI_UNKNOWN_TYPE_ID;

ffi::ErrorOr<std::unique_ptr<PermuteState>> Instantiate(
    ffi::Span<const int64_t> shape, ffi::Span<const int64_t> axes,
    int64_t itemsize) {
  PermutePlan plan;
  Status status = MakePermutePlan({shape.begin(), shape.size()},
                                  {axes.begin(), axes.size()}, itemsize, &plan);
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  return std::make_unique<PermuteState>(
      PermuteState{ChoosePermuteKernel(plan)});
}

ffi::Error Execute(PermuteState* state, ExecutorContext::Type context,
                   ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Dictionary) {
  const PermutePlan& plan = state->kernel.plan;
  const int64_t count = plan.size / plan.itemsize;
  for (const ffi::AnyBuffer& buffer : {x, *y}) {
    if (static_cast<int64_t>(buffer.element_count()) != count ||
        static_cast<int64_t>(ffi::ByteWidth(buffer.element_type())) !=
            plan.itemsize) {
      return ffi::Error::InvalidArgument(
          "permute: operand and result must have " + std::to_string(count) +
          " elements of " + std::to_string(plan.itemsize) + " bytes, got " +
          std::to_string(buffer.element_count()) + " of " +
          std::to_string(ffi::ByteWidth(buffer.element_type())) + ".");
    }
  }
  if (count == 0) return ffi::Error::Success();
  return ToError(Permute(state->kernel, x.untyped_data(), y->untyped_data(),
                         ToExecutor(context)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<ffi::Span<const int64_t>>("shape")
                           .Attr<ffi::Span<const int64_t>>("axes")
                           .Attr<int64_t>("itemsize"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<PermuteState>>()
                           .Ctx<ExecutorContext::Tag>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attrs(),               // read in Instantiate
                       {ffi::Traits::kCmdBufferCompatible});

JAX_LAYOUT_REGISTER(permute, kInstantiate, kExecute, PermuteState);

}  // namespace
}  // namespace jax_layout
