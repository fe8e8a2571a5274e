// SPDX-License-Identifier: Apache-2.0
//
// A plain thread pool: what XLA's is to the library, for benchmarks without
// XLA.
#ifndef JAX_LAYOUT_BENCHMARKS_NATIVE_THREAD_POOL_H_
#define JAX_LAYOUT_BENCHMARKS_NATIVE_THREAD_POOL_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu/executor.h"

namespace jax_layout {

class ThreadPool final : public Executor {
 public:
  // One thread fewer than asked for: the caller works too.
  explicit ThreadPool(int num_threads) : num_threads_(num_threads) {
    for (int i = 1; i < num_threads; ++i) {
      std::thread([this] { Work(); }).detach();
    }
  }

  // Never destroyed, so that its threads need not stop.
  static const ThreadPool& OfSize(int num_threads) {
    static std::mutex mutex;
    static std::deque<const ThreadPool*> pools;
    std::lock_guard lock(mutex);
    for (const ThreadPool* pool : pools) {
      if (pool->num_threads() == num_threads) return *pool;
    }
    return *pools.emplace_back(new ThreadPool(num_threads));
  }

  int num_threads() const override { return num_threads_; }

  void Schedule(std::function<void()> task) const override {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  void Work() const {
    for (;;) {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  const int num_threads_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ready_;
  mutable std::deque<std::function<void()>> tasks_;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_BENCHMARKS_NATIVE_THREAD_POOL_H_
