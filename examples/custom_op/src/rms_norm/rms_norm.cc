// SPDX-License-Identifier: Apache-2.0
//
// y = x r w, r = 1 / sqrt(mean(x^2) + eps), for rows of w's length; cotangents.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

static float Scale(const float* x, int64_t n, double eps) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum / static_cast<float>(n) + static_cast<float>(eps));
}

static ffi::Error Forward(double eps, F32 x, F32 w, Result y) {
  const int64_t n = w.element_count();
  for (int64_t at = 0; at < static_cast<int64_t>(x.element_count()); at += n) {
    const float* row = x.typed_data() + at;
    const float r = Scale(row, n, eps);
    for (int64_t i = 0; i < n; ++i) {
      y->typed_data()[at + i] = row[i] * r * w.typed_data()[i];
    }
  }
  return ffi::Error::Success();
}

// dx = r (g - x r^2 mean(g x)) with g = ct w; dw is the sum of ct x r over
// rows.
static ffi::Error Backward(double eps, F32 x, F32 w, F32 ct, Result dx,
                           Result dw) {
  const int64_t n = w.element_count();
  std::fill_n(dw->typed_data(), n, 0.f);
  for (int64_t at = 0; at < static_cast<int64_t>(x.element_count()); at += n) {
    const float *row = x.typed_data() + at, *g = ct.typed_data() + at;
    const float r = Scale(row, n, eps);
    float dot = 0;
    for (int64_t i = 0; i < n; ++i) dot += g[i] * w.typed_data()[i] * row[i];
    const float c = r * r * dot / static_cast<float>(n);
    for (int64_t i = 0; i < n; ++i) {
      dx->typed_data()[at + i] = r * (g[i] * w.typed_data()[i] - row[i] * c);
      dw->typed_data()[i] += g[i] * row[i] * r;
    }
  }
  return ffi::Error::Success();
}

static auto Bind() {
  return ffi::Ffi::Bind().Attr<double>("eps").Arg<F32>().Arg<F32>();
}
XLA_FFI_DEFINE_HANDLER(kForward, Forward, Bind().Ret<F32>());
XLA_FFI_DEFINE_HANDLER(kBackward, Backward,
                       Bind().Arg<F32>().Ret<F32>().Ret<F32>());
PYBIND11_MODULE(_cpu, m) {
  m.attr("forward") = pybind11::capsule(reinterpret_cast<void*>(kForward));
  m.attr("backward") = pybind11::capsule(reinterpret_cast<void*>(kBackward));
}
