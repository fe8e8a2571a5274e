// SPDX-License-Identifier: Apache-2.0
//
// An executor for tests of kernels without XLA.
#ifndef JAX_LAYOUT_TESTS_THREADS_H_
#define JAX_LAYOUT_TESTS_THREADS_H_

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/executor.h"

namespace jax_layout {

// Starts a thread per task, or runs tasks inline.
class Threads final : public Executor {
 public:
  explicit Threads(int num_threads, bool run_inline = false)
      : num_threads_(num_threads), run_inline_(run_inline) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> task) const override {
    if (run_inline_) return task();
    threads_.emplace_back(std::move(task));
  }

 private:
  int num_threads_;
  bool run_inline_;
  mutable std::vector<std::thread> threads_;
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_THREADS_H_
