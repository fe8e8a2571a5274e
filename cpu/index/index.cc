// SPDX-License-Identifier: Apache-2.0
//
// Rows that an index names: copied as blocks of the permute are.
#include "cpu/index/index.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/index/rows.h"
#include "cpu/isa.h"
#include "cpu/pages.h"
#include "cpu/permute/permute.h"

namespace jax_layout {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kMostRows = 16 * kRows;  // of a task
constexpr int64_t kLine = 64;

// y[i] = x[at[i]] for rows of kBytes.
template <int kBytes>
void Gather(const char* x, const int64_t* at, int64_t rows, char* y) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(y + i * kBytes, x + at[i] * kBytes, kBytes);
  }
}

using GatherFunction = void(const char*, const int64_t*, int64_t, char*);

GatherFunction* GatherOf(int64_t bytes) {
  switch (bytes) {
    case 1:
      return Gather<1>;
    case 2:
      return Gather<2>;
    case 4:
      return Gather<4>;
    case 6:
      return Gather<6>;
    case 8:
      return Gather<8>;
    case 12:
      return Gather<12>;
    case 16:
      return Gather<16>;
    case 32:
      return Gather<32>;
    default:
      return nullptr;
  }
}

}  // namespace

Status IndexSelect(const IndexPlan& plan, const void* x, const void* index,
                   const uint8_t* fill, void* y, const Executor& executor) {
  const IndexPlan& p = plan;
  const int64_t row_bytes = p.inner_bytes();
  const int64_t size = p.batch * p.outer * p.count * row_bytes;
  TouchPages(static_cast<char*>(y), size, executor);
  const PermuteFunctions& functions = FunctionsOf();
  GatherFunction* const gather = GatherOf(row_bytes);
  BlockFunction* const copy =
      row_bytes < kLine ? functions.move : functions.copy;
  // A task: some slices, some rows of each, a part of a row if it is large.
  const int64_t part = std::min(row_bytes, kTaskBytes);
  const int64_t parts = CeilDiv(row_bytes, part);
  const int64_t rows =
      std::min({p.count, kMostRows, std::max<int64_t>(1, kTaskBytes / part)});
  const int64_t blocks = CeilDiv(p.count, rows);
  const int64_t slices =
      std::min(p.outer, std::max<int64_t>(1, kTaskBytes / (rows * part)));
  const int64_t groups = CeilDiv(p.outer, slices);
  const bool stream = size > StreamBytes() && row_bytes >= 4 * kLine &&
                      functions.vector_bytes > 16;
  executor.ParallelFor(p.batch * groups * blocks * parts, [&](int64_t task) {
    const int64_t offset = task % parts * part;
    const int64_t bytes = std::min(part, row_bytes - offset);
    const int64_t begin = task / parts % blocks * rows;
    const int64_t end = std::min(begin + rows, p.count);
    const int64_t group = task / parts / blocks % groups;
    const int64_t batch = task / parts / blocks / groups;
    const int64_t last = std::min((group + 1) * slices, p.outer);
    int64_t at[kRows];
    int64_t none[kRows];  // rows of y that no row of x goes to
    for (int64_t first = begin; first < end; first += kRows) {
      const int64_t n = std::min(kRows, end - first);
      int64_t num_none = 0;
      const int64_t zero = 0;
      if (!ResolveRows(p, index, batch * p.count + first, n, at)) {
        for (int64_t i = 0; i < n; ++i) {
          if (at[i] >= 0) continue;
          none[num_none++] = i;
          at[i] = 0;
        }
      }
      if (gather == nullptr) {
        for (int64_t i = 0; i < n; ++i) at[i] *= row_bytes;
      }
      for (int64_t o = group * slices; o < last; ++o) {
        const int64_t slice = batch * p.outer + o;
        const char* from =
            static_cast<const char*>(x) + slice * p.extent * row_bytes + offset;
        char* to = static_cast<char*>(y) +
                   (slice * p.count + first) * row_bytes + offset;
        if (gather != nullptr) {
          gather(from, at, n, to);
        } else {
          PermuteBlock block = {};
          block.x = from;
          block.y = to;
          block.x_offset = at;
          block.y_offset = &zero;
          block.rows = n;
          block.cols = 1;
          block.bytes = bytes;
          block.stream = stream;
          copy(block);
        }
        for (int64_t i = 0; i < num_none; ++i) {
          char* row = to + none[i] * row_bytes;
          for (int64_t k = 0; k < bytes; k += p.itemsize) {
            std::memcpy(row + k, fill, p.itemsize);
          }
        }
      }
    }
    if (stream) FenceStores();
  });
  return Status::Ok();
}

}  // namespace jax_layout
