// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/cache.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"

namespace jax_layout {
namespace {

// Bytes worth handing to another thread.
constexpr int64_t kTaskBytes = 256 << 10;

}  // namespace

bool CacheHolds(const CacheProblem& p, const int32_t* positions) {
  return std::all_of(positions, positions + p.batch, [&](int64_t at) {
    return at >= 0 && at + p.count <= p.rows;
  });
}

void UpdateCache(const CacheProblem& p, const void* rows,
                 const int32_t* positions, void* cache,
                 const Executor& executor) {
  const int64_t pieces = p.batch * p.middle, bytes = p.count * p.bytes;
  if (pieces == 0 || bytes == 0) return;
  const int64_t together = std::max<int64_t>(1, kTaskBytes / bytes);
  executor.ParallelFor(CeilDiv(pieces, together), [&](int64_t task) {
    const int64_t end = std::min(pieces, (task + 1) * together);
    for (int64_t i = task * together; i < end; ++i) {
      const int64_t at = positions[i / p.middle];
      const int64_t first = std::clamp<int64_t>(-at, 0, p.count);
      const int64_t last = std::clamp<int64_t>(p.rows - at, first, p.count);
      if (first == last) continue;
      std::memcpy(
          static_cast<char*>(cache) + (i * p.rows + at + first) * p.bytes,
          static_cast<const char*>(rows) + i * bytes + first * p.bytes,
          static_cast<size_t>((last - first) * p.bytes));
    }
  });
}

}  // namespace jax_layout
