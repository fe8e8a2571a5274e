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
#include <vector>

#include "core/arithmetic.h"

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

  // Runs fn(i, worker) for every i in [0, n), in any order, on the pool's
  // threads and on the calling one, by workers in [0, workers), none of which
  // is in two calls at a time: what it has of its own, such as memory, is the
  // call's. The caller works too and waits only for tasks that some thread is
  // already in, so a pool that is busy, or has a single thread that is the
  // caller's own, cannot deadlock.
  template <typename Fn>
  void ParallelForWorkers(int64_t n, int64_t workers, const Fn& fn) const {
    workers = std::min<int64_t>({n, workers, num_threads()});
    if (workers <= 1) {
      for (int64_t i = 0; i < n; ++i) fn(i, 0);
      return;
    }
    // Each begins with a part of its own, as XLA's loops cut theirs: what a
    // thread has in its caches and its TLB is what the calls around this one
    // had it read and write. Then it takes what others have left.
    struct Shared {
      explicit Shared(int64_t workers) : next(workers) {}
      std::vector<std::atomic<int64_t>> next;
      std::atomic<int64_t> done{0};
    };
    auto shared = std::make_shared<Shared>(workers);
    for (int64_t w = 0; w < workers; ++w) shared->next[w] = w * n / workers;
    // A helper that starts after all is taken touches only `shared`, never
    // `fn`, which by then may be gone.
    auto work = [shared, n, workers, &fn](int64_t worker) {
      for (int64_t part = worker, left = workers; left > 0; --left) {
        const int64_t end = (part + 1) * n / workers;
        for (int64_t i; (i = shared->next[part].fetch_add(1)) < end;) {
          fn(i, worker);
          if (shared->done.fetch_add(1) + 1 == n) shared->done.notify_all();
        }
        if (++part == workers) part = 0;
      }
    };
    for (int64_t w = 1; w < workers; ++w) Schedule([work, w] { work(w); });
    work(0);
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

  // Likewise fn(i), by as many workers as the pool has threads.
  template <typename Fn>
  void ParallelFor(int64_t n, const Fn& fn) const {
    ParallelForWorkers(n, num_threads(), [&](int64_t i, int64_t) { fn(i); });
  }

  // Runs fn(begin, end) for even parts of [0, n), none longer than `most`.
  template <typename Fn>
  void ParallelForParts(int64_t n, int64_t most, const Fn& fn) const {
    const int64_t parts = CeilDiv(n, most);
    ParallelFor(parts,
                [&](int64_t i) { fn(i * n / parts, (i + 1) * n / parts); });
  }
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_EXECUTOR_H_
