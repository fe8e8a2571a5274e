// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_pool", on CPUs.
//
//   operand  x: float32, float64 or bfloat16
//   result   the reduced windows; sums are float64 for float64, else float32
//
//   kind     int64: 0 sums, 1 maxima
//   shape    int64[2]: of x, what is outside of the windows' axes and inside
//   windows  int64[3, 6]: per axis of windows, in the order of memory: extents
//   of
//            x and of the result, then of windows size, stride and dilation,
//            and how far the first begins before x
#include "core/float_types.h"
#include "core/registry.h"
#include "platform.h"   // the backend's
#include "pool/pool.h"  // the backend's

namespace jax_layout {
namespace {

Status Plan(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, int64_t kind,
            ffi::Span<const int64_t> shape, ffi::Span<const int64_t> windows,
            PoolProblem* problem) {
  if (shape.size() != 2 || windows.size() != 18 || kind < 0 || kind > 1)
    return Status::Error("pool: there is no such kind, shape or windows.");
  problem->kind = static_cast<PoolKind>(kind);
  problem->outer = shape[0];
  problem->inner = shape[1];
  int64_t before = shape[0] * shape[1], after = before;
  for (int i = 0; i < 3; ++i) {
    const int64_t* w = windows.begin() + 6 * i;
    problem->windows[i] = {w[0], w[1], w[2], w[3], w[4], w[5]};
    before *= w[0];
    after *= w[1];
    if (w[2] < 1 || w[3] < 1 || w[4] < 1)
      return Status::Error("pool: sizes, strides and dilations are from 1 on.");
  }
  bool known = false;
  for (const FloatType& t : kFloatTypes) {
    if (x.element_type() != t.ffi_type) continue;
    problem->type = t.type;
    known = y.element_type() == (kind == 0 ? t.sum : t.ffi_type);
  }
  if (!known || before == 0 || after == 0 ||
      static_cast<int64_t>(x.element_count()) != before ||
      static_cast<int64_t>(y.element_count()) != after) {
    return Status::Error(
        "pool: x must be float32, float64 or bfloat16, and arrays have the "
        "shape's and the windows' elements.");
  }
  return Status::Ok();
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> y, int64_t kind,
                   ffi::Span<const int64_t> shape,
                   ffi::Span<const int64_t> windows) {
  PoolProblem problem;
  const Status status = Plan(x, *y, kind, shape, windows, &problem);
  if (!status.ok()) return ToError(status);
  return ToError(
      Pool(problem, x.untyped_data(), y->untyped_data(), ToExecutor(pool)));
}

XLA_FFI_DEFINE_HANDLER(kPool, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("kind")
                           .Attr<ffi::Span<const int64_t>>("shape")
                           .Attr<ffi::Span<const int64_t>>("windows"));

JAX_LAYOUT_REGISTER_STATELESS(pool, kPool);

}  // namespace
}  // namespace jax_layout
