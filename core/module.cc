// SPDX-License-Identifier: Apache-2.0
//
// The extension module of one backend; JAX_LAYOUT_MODULE is _cpu or _cuda.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/gemm_plan.h"
#include "core/registry.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  for (auto* r = jax_layout::Registration::First(); r; r = r->next) {
    nb::dict handlers;
    handlers["instantiate"] = Capsule(r->instantiate);
    handlers["execute"] = Capsule(r->execute);
    targets[r->target] = handlers;
  }
  return targets;
}

nb::object Checked(const jax_layout::Status& status, nb::object value) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return value;
}

nb::object GemmOrder(const std::string& spec, const std::vector<int64_t>& a,
                     const std::vector<int64_t>& b, int64_t operand_itemsize,
                     int64_t result_itemsize) {
  jax_layout::GemmSpec order;
  int64_t moved = 0;
  const jax_layout::Status status = jax_layout::ChooseGemmOrder(
      spec, a, b, operand_itemsize, result_itemsize, &order, &moved);
  return Checked(status, nb::make_tuple(order.a, order.b, order.y, moved));
}

nb::dict Matrix(const jax_layout::GemmMatrix& matrix) {
  nb::dict d;
  d["transposed"] = matrix.transposed;
  d["ld"] = matrix.ld;
  return d;
}

nb::object GemmPlan(const std::string& spec, const std::vector<int64_t>& a,
                    const std::vector<int64_t>& b) {
  jax_layout::GemmPlan plan;
  bool in_place = false;
  const jax_layout::Status status =
      jax_layout::MakeGemmPlan(spec, a, b, &plan, &in_place);
  if (status.ok() && !in_place) return nb::none();
  nb::dict d;
  d["m"] = plan.m;
  d["n"] = plan.n;
  d["k"] = plan.k;
  d["a"] = Matrix(plan.a);
  d["b"] = Matrix(plan.b);
  d["y"] = Matrix(plan.y);
  nb::list loops;
  for (const jax_layout::GemmLoop& loop : plan.loops) {
    loops.append(nb::make_tuple(loop.extent, loop.a_stride, loop.b_stride,
                                loop.y_stride));
  }
  d["loops"] = loops;
  d["swapped"] = plan.swapped;
  return Checked(status, d);
}

}  // namespace

NB_MODULE(JAX_LAYOUT_MODULE, m) {
  m.doc() = "FFI handlers of one jax_layout backend.";
  m.attr("ffi_api_version") =
      nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  for (auto* e = jax_layout::ModuleExtension::First(); e; e = e->next) {
    e->extend(m.ptr());
  }
  m.def("registrations", &Registrations,
        "Maps each FFI target to its handlers, as jax.ffi.register_ffi_target "
        "takes them.");
  m.def("gemm_order", &GemmOrder,
        "ChooseGemmOrder: (a, b, y, bytes moved) for a contraction and the "
        "shapes and item sizes of its operands.");
  m.def("gemm_plan", &GemmPlan,
        "MakeGemmPlan: a dict, or None if the contraction does not run in "
        "place.");
}
