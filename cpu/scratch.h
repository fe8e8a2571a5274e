// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_SCRATCH_H_
#define JAX_LAYOUT_CPU_SCRATCH_H_

#include <cstdint>
#include <cstdlib>
#include <memory>

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

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_SCRATCH_H_
