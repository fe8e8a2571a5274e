// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_EXECUTOR_H_
#define JAX_LAYOUT_CPU_EXECUTOR_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace jax_layout {
namespace internal {

// Leaves the core's units to the other thread that may run on it.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace internal

// The processors that this process may use. Plans are made before the pool is
// known, which has about as many threads.
inline int ProcessorCount() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return std::max(1u, std::thread::hardware_concurrency());
}

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
    // What is left is mostly the end of one task. A thread that goes to sleep
    // takes 25 to 80 microseconds to be back, longer than most of these waits.
    constexpr std::chrono::microseconds kAwake{60};
    const auto sleep = std::chrono::steady_clock::now() + kAwake;
    while (shared->done.load() < n && std::chrono::steady_clock::now() < sleep)
      internal::Pause();
    for (int64_t done; (done = shared->done.load()) < n;) {
      shared->done.wait(done);
    }
  }

  // Runs fn(i, worker) for every i in [0, n), in any order, by workers in [0,
  // workers), none of which is in two calls at a time: what it has of its own,
  // such as memory, is the call's.
  template <typename Fn>
  void ParallelForWorkers(int64_t n, int64_t workers, const Fn& fn) const {
    std::atomic<int64_t> next{0};
    ParallelFor(std::min(n, std::max<int64_t>(workers, 1)),
                [&](int64_t worker) {
                  for (int64_t i; (i = next.fetch_add(1)) < n;) fn(i, worker);
                });
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_EXECUTOR_H_
