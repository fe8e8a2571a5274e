// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/cache.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"

namespace jax_layout {
namespace {

// Bytes worth handing to another thread.
constexpr int64_t kTaskBytes = 256 << 10;

// Where in the cache's batch a block of a sequence is; -1 for none.
int64_t BlockOf(const CacheProblem& p, int64_t batch, int64_t i) {
  if (p.tables == nullptr) return batch;
  const int64_t at = p.tables[batch * p.width + i];
  return at < p.blocks ? at : -1;
}

}  // namespace

bool CacheHolds(const CacheProblem& p, const int32_t* positions) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t at = positions[b], end = at + p.count;
    if (at < 0 || end > p.width * p.rows) return false;
    for (int64_t i = at / p.rows; i * p.rows < end; ++i) {
      if (BlockOf(p, b, i) < 0) return false;
    }
  }
  return true;
}

void UpdateCache(const CacheProblem& p, const void* rows,
                 const int32_t* positions, void* cache,
                 const Executor& executor) {
  const int64_t bytes = p.count * p.bytes;
  const int64_t of_front = p.batch * p.middle, pieces = p.front * of_front;
  const int64_t places = p.tables == nullptr ? p.batch : p.blocks;
  if (pieces == 0 || bytes == 0 || p.rows == 0) return;
  const int64_t together = std::max<int64_t>(1, kTaskBytes / bytes);
  executor.ParallelForParts(pieces, together, [&](int64_t piece, int64_t end) {
    for (; piece < end; ++piece) {
      const int64_t front = piece / of_front, middle = piece % p.middle;
      const int64_t batch = piece % of_front / p.middle;
      const int64_t at = positions[batch];
      int64_t i = std::clamp<int64_t>(-at, 0, p.count);
      const int64_t last = std::clamp(p.width * p.rows - at, i, p.count);
      while (i < last) {  // block by block
        const int64_t block = BlockOf(p, batch, (at + i) / p.rows);
        const int64_t row = (at + i) % p.rows;
        const int64_t n = std::min(last - i, p.rows - row);
        if (block >= 0) {
          std::memcpy(
              static_cast<char*>(cache) +
                  (((front * places + block) * p.middle + middle) * p.rows +
                   row) *
                      p.bytes,
              static_cast<const char*>(rows) + piece * bytes + i * p.bytes,
              static_cast<size_t>(n * p.bytes));
        }
        i += n;
      }
    }
  });
}

}  // namespace jax_layout
