// SPDX-License-Identifier: Apache-2.0
//
// The smallest second operator: c = a b in float64, so that the tests of Op
// meet a kernel with two operands and a summed axis. With -DTOY_API_MINOR=n the
// handler claims to be built against XLA FFI 0.n.
#include "xla/ffi/api/c_api.h"
#ifdef TOY_API_MINOR
#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR TOY_API_MINOR
#endif
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Matmul(ffi::Buffer<ffi::F64> a, ffi::Buffer<ffi::F64> b,
                         ffi::ResultBuffer<ffi::F64> c) {
  const int64_t m = a.dimensions()[0], k = a.dimensions()[1];
  const int64_t n = b.dimensions()[1];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a.typed_data()[i * k + l] * b.typed_data()[l * n + j];
      }
      c->typed_data()[i * n + j] = sum;
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ToyMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F64>>()
                                  .Arg<ffi::Buffer<ffi::F64>>()
                                  .Ret<ffi::Buffer<ffi::F64>>());
