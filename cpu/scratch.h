// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_SCRATCH_H_
#define JAX_LAYOUT_CPU_SCRATCH_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/arithmetic.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_layout {

// A thread's memory, kept from call to call: new memory would cost page faults
// every time. Huge pages save misses of the TLB.
class Scratch {
 public:
  // At least so many bytes, or null; what it held before is lost.
  char* Reserve(int64_t bytes) {
    constexpr int64_t kPage = 2 << 20;
    if (bytes > size_) {
      bytes = RoundUp(bytes, kPage);
      memory_.reset();
      memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, bytes)));
      size_ = memory_ == nullptr ? 0 : bytes;
#ifdef __linux__
      if (memory_ != nullptr) {
        static_cast<void>(madvise(memory_.get(), bytes, MADV_HUGEPAGE));
      }
#endif
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// Memory that one call has to itself, and leaves to the next on any thread. As
// many are kept as calls have run at a time, at most four.
class LentScratch {
 public:
  LentScratch() {
    const std::lock_guard<std::mutex> lock(Shelf().mutex);
    if (Shelf().kept.empty()) return;
    scratch_ = std::move(Shelf().kept.back());
    Shelf().kept.pop_back();
  }
  ~LentScratch() {
    constexpr int kMost = 4;
    const std::lock_guard<std::mutex> lock(Shelf().mutex);
    if (Shelf().kept.size() < kMost) {
      Shelf().kept.push_back(std::move(scratch_));
    }
  }
  LentScratch(const LentScratch&) = delete;
  LentScratch& operator=(const LentScratch&) = delete;

  char* Reserve(int64_t bytes) { return scratch_.Reserve(bytes); }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<Scratch> kept;
  };
  // Never destroyed: threads may run calls while the process ends.
  static Kept& Shelf() {
    static Kept* const kept = new Kept;
    return *kept;
  }

  Scratch scratch_;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_SCRATCH_H_
