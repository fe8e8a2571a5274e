// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_EXECUTOR_H_
#define JAX_LAYOUT_CPU_EXECUTOR_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace jax_layout {

// What a CPU kernel runs on: somebody's thread pool, in practice XLA's own
// (platform.h). Kernels start no threads.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int num_threads() const = 0;
  virtual void Schedule(std::function<void()> task) const = 0;

  // Runs fn(i) for every i in [0, n), in any order, on the pool's threads and
  // on the calling one. The caller works too and waits only for tasks that
  // some thread is already in, so a pool that is busy, or has a single thread
  // that is the caller's own, cannot deadlock.
  template <typename Fn>
  void ParallelFor(int64_t n, const Fn& fn) const {
    const int64_t workers = std::min<int64_t>(n, num_threads());
    if (workers <= 1) {
      for (int64_t i = 0; i < n; ++i) fn(i);
      return;
    }
    struct Shared {
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
    };
    auto shared = std::make_shared<Shared>();
    // A helper that starts after all is taken touches only `shared`, never
    // `fn`, which by then may be gone.
    auto work = [shared, n, &fn] {
      for (int64_t i; (i = shared->next.fetch_add(1)) < n;) {
        fn(i);
        if (shared->done.fetch_add(1) + 1 == n) shared->done.notify_all();
      }
    };
    for (int64_t w = 1; w < workers; ++w) Schedule(work);
    work();
    for (int64_t done; (done = shared->done.load()) < n;) {
      shared->done.wait(done);
    }
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_EXECUTOR_H_
