// SPDX-License-Identifier: Apache-2.0
//
// The FFI targets "jax_layout_moments" and "jax_layout_centered_sums", on CPUs.
//
//   moments
//     operand   x, not empty
//     results   mean, variance
//
//   centered_sums
//     operands  ct, x of one shape and dtype; center
//     results   the sum of ct, and that of ct * (x - center)
//
//   shape  int64[5], of x: sums are over axes 1 and 3. Results and center have
//          what is left of it; they are float64 for float64, else float32.
#include "core/float_types.h"
#include "core/registry.h"
#include "moments/moments.h"  // the backend's
#include "platform.h"         // the backend's

namespace jax_layout {
namespace {

Status Plan(const ffi::AnyBuffer& x, const ffi::AnyBuffer& first,
            const ffi::AnyBuffer& second, ffi::Span<const int64_t> shape,
            MomentsProblem* problem) {
  if (shape.size() != 5)
    return Status::Error("moments: shape must have 5 axes.");
  problem->b = shape[0];
  problem->r = shape[1];
  problem->k = shape[2];
  problem->s = shape[3];
  problem->l = shape[4];
  const int64_t kept = shape[0] * shape[2] * shape[4];
  const int64_t elements = static_cast<int64_t>(x.element_count());
  bool known = false;
  for (const FloatType& t : kFloatTypes) {
    if (x.element_type() != t.ffi_type) continue;
    problem->type = t.type;
    known = first.element_type() == t.sum && second.element_type() == t.sum;
  }
  if (!known || elements == 0 || elements != kept * shape[1] * shape[3] ||
      static_cast<int64_t>(first.element_count()) != kept ||
      static_cast<int64_t>(second.element_count()) != kept) {
    return Status::Error(
        "moments: x must be of a floating dtype and have the shape's elements, "
        "and results what is left of it.");
  }
  return Status::Ok();
}

ffi::Error ExecuteMoments(ffi::ThreadPool pool, ffi::AnyBuffer x,
                          ffi::Result<ffi::AnyBuffer> mean,
                          ffi::Result<ffi::AnyBuffer> variance,
                          ffi::Span<const int64_t> shape) {
  MomentsProblem problem;
  const Status status = Plan(x, *mean, *variance, shape, &problem);
  if (!status.ok()) return ToError(status);
  return ToError(Moments(problem, x.untyped_data(), mean->untyped_data(),
                         variance->untyped_data(), ToExecutor(pool)));
}

ffi::Error ExecuteSums(ffi::ThreadPool pool, ffi::AnyBuffer ct,
                       ffi::AnyBuffer x, ffi::AnyBuffer center,
                       ffi::Result<ffi::AnyBuffer> sum,
                       ffi::Result<ffi::AnyBuffer> product,
                       ffi::Span<const int64_t> shape) {
  MomentsProblem problem;
  const Status status = Plan(x, *sum, *product, shape, &problem);
  if (!status.ok()) return ToError(status);
  if (ct.element_type() != x.element_type() ||
      ct.element_count() != x.element_count() ||
      center.element_type() != sum->element_type() ||
      center.element_count() != sum->element_count()) {
    return ffi::Error::InvalidArgument(
        "centered_sums: ct must be as x, and center as a result.");
  }
  return ToError(CenteredSums(problem, ct.untyped_data(), x.untyped_data(),
                              center.untyped_data(), sum->untyped_data(),
                              product->untyped_data(), ToExecutor(pool)));
}

XLA_FFI_DEFINE_HANDLER(kMoments, ExecuteMoments,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // mean
                           .Ret<ffi::AnyBuffer>()  // variance
                           .Attr<ffi::Span<const int64_t>>("shape"));

XLA_FFI_DEFINE_HANDLER(kSums, ExecuteSums,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // ct
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // center
                           .Ret<ffi::AnyBuffer>()  // sum
                           .Ret<ffi::AnyBuffer>()  // product
                           .Attr<ffi::Span<const int64_t>>("shape"));

JAX_LAYOUT_REGISTER_STATELESS(moments, kMoments);
JAX_LAYOUT_REGISTER_STATELESS(centered_sums, kSums);

}  // namespace
}  // namespace jax_layout
