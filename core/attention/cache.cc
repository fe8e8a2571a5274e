// SPDX-License-Identifier: Apache-2.0
//
// The FFI target "jax_layout_update_cache", on CPUs.
//
//   operands  cache, aliased to the result; new, of the same dtype and shape
//             but for the rows; position, int32, one for each of the batch;
//             for a cache in blocks, tables, int32, 2-D: batch, and which of
//             the cache's holds each block of rows
//   result    the cache
//   first     int64: the axis that is the batch, or the blocks
//   axis      int64: that of the rows, behind it
//   strict    bool: whether rows without a place are an error
#include "attention/cache.h"  // the backend's

#include "core/registry.h"
#include "platform.h"  // the backend's

namespace jax_layout {
namespace {

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer cache,
                   ffi::AnyBuffer rows, ffi::AnyBuffer position,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                   int64_t first, int64_t axis, bool strict) {
  const auto shape = cache.dimensions(), of_rows = rows.dimensions();
  bool fits = first >= 0 && axis > first &&
              axis < static_cast<int64_t>(shape.size()) &&
              of_rows.size() == shape.size() &&
              y->element_count() == cache.element_count() &&
              y->element_type() == cache.element_type() &&
              rows.element_type() == cache.element_type() &&
              position.element_type() == ffi::S32;
  CacheProblem p;
  p.bytes = static_cast<int64_t>(ffi::ByteWidth(cache.element_type()));
  for (size_t d = 0; fits && d < shape.size(); ++d) {
    const auto batch = static_cast<size_t>(first);
    const auto at = static_cast<size_t>(axis);
    if (d == at) continue;
    fits = shape[d] == of_rows[d] || (d == batch && rest.size() == 1);
    (d < batch    ? p.front
     : d == batch ? p.batch
     : d < at     ? p.middle
                  : p.bytes) *= of_rows[d];
  }
  if (fits && rest.size() == 1) {
    const auto tables = *rest.get<ffi::AnyBuffer>(0);
    const auto extents = tables.dimensions();
    fits = extents.size() == 2 && extents[0] == p.batch &&
           tables.element_type() == ffi::S32;
    p.tables = static_cast<const int32_t*>(tables.untyped_data());
    p.blocks = shape[first];
    p.width = fits ? extents[1] : 0;
  }
  if (!fits || static_cast<int64_t>(position.element_count()) != p.batch) {
    return ffi::Error::InvalidArgument(
        "update_cache: new must be shaped as cache but for its rows, with a "
        "position, and a row of tables, for each of the batch.");
  }
  p.rows = shape[axis];
  p.count = of_rows[axis];
  const auto* positions = static_cast<const int32_t*>(position.untyped_data());
  if (strict && !CacheHolds(p, positions)) {
    return ffi::Error::InvalidArgument(
        "update_cache: a position is out of the cache's range, or in a block "
        "that it does not have.");
  }
  // Where the cache is still needed, XLA has copied it to the result.
  UpdateCache(p, rows.untyped_data(), positions, y->untyped_data(),
              ToExecutor(pool));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // cache
                           .Arg<ffi::AnyBuffer>()  // new
                           .Arg<ffi::AnyBuffer>()  // position
                           .RemainingArgs()        // tables
                           .Ret<ffi::AnyBuffer>()  // cache
                           .Attr<int64_t>("first")
                           .Attr<int64_t>("axis")
                           .Attr<bool>("strict"));

JAX_LAYOUT_REGISTER_STATELESS(update_cache, kExecute);

}  // namespace
}  // namespace jax_layout
