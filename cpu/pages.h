// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_PAGES_H_
#define JAX_LAYOUT_CPU_PAGES_H_

#include <algorithm>
#include <cstdint>

#include "cpu/executor.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_layout {

// Less comes from memory that malloc keeps.
inline constexpr int64_t kTouchBytes = 1 << 20;

#ifdef __linux__
// A large result is often memory that was never touched, and then page faults
// cost several times what is written to it. Huge pages take 512 times fewer.
// They are made up front, each by one thread: kernels write all over y, where
// threads would meet in a page, both clear one, and throw one away.
inline void TouchPages(char* y, int64_t size, const Executor& executor) {
  constexpr int64_t kPage = 4 << 10, kHugePage = 2 << 20;
  // MADV_POPULATE_WRITE of Linux 5.14, which older headers lack.
  constexpr int kPopulateWrite = 23;
  if (size < kTouchBytes) return;
  auto pointer = [](intptr_t at) { return reinterpret_cast<void*>(at); };
  const intptr_t begin = (reinterpret_cast<intptr_t>(y) + kPage - 1) & -kPage;
  const intptr_t end = (reinterpret_cast<intptr_t>(y) + size) & -kPage;
  unsigned char present = 0;
  if (mincore(pointer((begin + end) / 2 & -kPage), kPage, &present) != 0 ||
      present != 0) {
    return;
  }
  // All of this is only advice: that it may fail does not matter.
  const intptr_t first = (begin + kHugePage - 1) & -kHugePage;
  const intptr_t last = end & -kHugePage;
  if (first < last) {
    static_cast<void>(madvise(pointer(first), last - first, MADV_HUGEPAGE));
  }
  const intptr_t base = begin & -kHugePage;
  executor.ParallelFor(
      (end - base + kHugePage - 1) / kHugePage, [&](int64_t i) {
        const intptr_t from = std::max<intptr_t>(begin, base + i * kHugePage);
        const intptr_t to = std::min<intptr_t>(end, base + (i + 1) * kHugePage);
        static_cast<void>(madvise(pointer(from), to - from, kPopulateWrite));
      });
}
#else
inline void TouchPages(char*, int64_t, const Executor&) {}
#endif

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PAGES_H_
