// SPDX-License-Identifier: Apache-2.0
//
// The CPU permute as a C function, for tests without JAX.
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/permute_plan.h"
#include "cpu/permute.h"

namespace {

using jax_layout::Executor;

// Starts a thread per task, or runs tasks inline.
class Threads final : public Executor {
 public:
  Threads(int num_threads, bool run_inline)
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

}  // namespace

extern "C" {

int BestIsa() { return static_cast<int>(jax_layout::BestIsa()); }

// 0 if y was written.
int Permute(int rank, const int64_t* shape, const int64_t* axes,
            int64_t itemsize, int isa, int num_threads, int run_inline,
            const void* x, void* y) {
  jax_layout::PermutePlan plan;
  const size_t n = static_cast<size_t>(rank);
  if (!jax_layout::MakePermutePlan({shape, n}, {axes, n}, itemsize, &plan)
           .ok()) {
    return 1;
  }
  const jax_layout::PermuteKernel kernel =
      jax_layout::ChoosePermuteKernel(plan, static_cast<jax_layout::Isa>(isa));
  if (plan.size == 0) return 0;
  const Threads threads(num_threads, run_inline != 0);
  return jax_layout::Permute(kernel, x, y, threads).ok() ? 0 : 1;
}

}  // extern "C"
