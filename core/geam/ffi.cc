// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_geam", on CPUs; a GPU's compiler makes one kernel
// of the sum itself.
//
//   operands  a, b, any leading axes and a matrix each, row-major
//   result    y, the same dtype
//   alpha, beta               float64[2], real and imaginary part
//   transpose_a, transpose_b  bool
#include "core/registry.h"
#include "geam/geam.h"  // the backend's
#include "platform.h"   // the backend's

namespace jax_layout {
namespace {

struct FfiType {
  ffi::DataType ffi_type;
  DType type;
};
constexpr FfiType kTypes[] = {{ffi::F32, DType::kF32},
                              {ffi::F64, DType::kF64},
                              {ffi::BF16, DType::kBF16},
                              {ffi::C64, DType::kC64},
                              {ffi::C128, DType::kC128}};

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                   ffi::Result<ffi::AnyBuffer> y, ffi::Span<const double> alpha,
                   ffi::Span<const double> beta, bool transpose_a,
                   bool transpose_b) {
  GeamProblem problem;
  bool known = false;
  for (const FfiType& t : kTypes) {
    if (y->element_type() != t.ffi_type) continue;
    problem.type = t.type;
    known = a.element_type() == t.ffi_type && b.element_type() == t.ffi_type;
  }
  const auto shape = y->dimensions();
  if (!known || shape.size() < 2 || alpha.size() != 2 || beta.size() != 2 ||
      a.element_count() != y->element_count() ||
      b.element_count() != y->element_count()) {
    return ffi::Error::InvalidArgument(
        "geam: a, b and y must be matrices of one floating-point dtype and "
        "size.");
  }
  problem.m = shape[shape.size() - 2];
  problem.n = shape[shape.size() - 1];
  if (y->element_count() == 0) return ffi::Error::Success();
  problem.batch = y->element_count() / (problem.m * problem.n);
  problem.transpose_a = transpose_a;
  problem.transpose_b = transpose_b;
  problem.alpha = {alpha[0], alpha[1]};
  problem.beta = {beta[0], beta[1]};
  return ToError(Geam(problem, a.untyped_data(), b.untyped_data(),
                      y->untyped_data(), ToExecutor(pool)));
}

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // a
                           .Arg<ffi::AnyBuffer>()  // b
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<ffi::Span<const double>>("alpha")
                           .Attr<ffi::Span<const double>>("beta")
                           .Attr<bool>("transpose_a")
                           .Attr<bool>("transpose_b"));

JAX_LAYOUT_REGISTER_STATELESS(geam, kExecute);

}  // namespace
}  // namespace jax_layout
