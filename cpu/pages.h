// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_PAGES_H_
#define JAX_LAYOUT_CPU_PAGES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/executor.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_layout {

// Less comes from memory that malloc keeps.
inline constexpr int64_t kTouchBytes = 1 << 20;
// More never does, in glibc.
inline constexpr int64_t kZeroBytes = 32 << 20;
inline constexpr int64_t kHugePage = 2 << 20;

#ifdef __linux__
namespace pages {

inline constexpr int64_t kPage = 4 << 10;

inline void* Pointer(intptr_t at) { return reinterpret_cast<void*>(at); }

// The whole pages of y.
struct Range {
  Range(char* y, int64_t size)
      : begin((reinterpret_cast<intptr_t>(y) + kPage - 1) & -kPage),
        end((reinterpret_cast<intptr_t>(y) + size) & -kPage) {}

  bool Untouched() const {
    unsigned char present = 0;
    return mincore(Pointer((begin + end) / 2 & -kPage), kPage, &present) == 0 &&
           present == 0;
  }

  // This and the next are only advice: that it may fail does not matter.
  void WantHuge() const {
    const intptr_t first = (begin + kHugePage - 1) & -kHugePage;
    const intptr_t last = end & -kHugePage;
    if (first < last) {
      static_cast<void>(madvise(Pointer(first), last - first, MADV_HUGEPAGE));
    }
  }

  void Make(const Executor& executor) const {
    // MADV_POPULATE_WRITE of Linux 5.14, which older headers lack.
    constexpr int kPopulateWrite = 23;
    const intptr_t base = begin & -kHugePage;
    executor.ParallelFor(
        (end - base + kHugePage - 1) / kHugePage, [&](int64_t i) {
          const intptr_t from = std::max<intptr_t>(begin, base + i * kHugePage);
          const intptr_t to =
              std::min<intptr_t>(end, base + (i + 1) * kHugePage);
          static_cast<void>(madvise(Pointer(from), to - from, kPopulateWrite));
        });
  }

  intptr_t begin, end;
};

}  // namespace pages

// A large result is often memory that was never touched, and then page faults
// cost several times what is written to it. Huge pages take 512 times fewer.
// They are made up front, each by one thread: kernels write all over y, where
// threads would meet in a page, both clear one, and throw one away.
inline void TouchPages(char* y, int64_t size, const Executor& executor) {
  if (size < kTouchBytes) return;
  const pages::Range range(y, size);
  if (!range.Untouched()) return;
  range.WantHuge();
  range.Make(executor);
}

// Whether y is zero now, without having been written: memory that was never
// touched is, once a page of it is. Rather by one thread for all of a page.
inline bool ZeroPages(char* y, int64_t size) {
  if (size < kZeroBytes) return false;
  const pages::Range range(y, size);
  if (!range.Untouched()) return false;
  // Whatever y held is given back. That what comes instead is zero is true of
  // private anonymous memory, which is all that MADV_FREE takes.
  const auto bytes = static_cast<size_t>(range.end - range.begin);
  if (madvise(pages::Pointer(range.begin), bytes, MADV_FREE) != 0 ||
      madvise(pages::Pointer(range.begin), bytes, MADV_DONTNEED) != 0) {
    return false;
  }
  range.WantHuge();
  const auto at = reinterpret_cast<intptr_t>(y);
  std::memset(y, 0, static_cast<size_t>(range.begin - at));
  std::memset(pages::Pointer(range.end), 0,
              static_cast<size_t>(at + size - range.end));
  return true;
}
#else
inline void TouchPages(char*, int64_t, const Executor&) {}
inline bool ZeroPages(char*, int64_t) { return false; }
#endif

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PAGES_H_
