// SPDX-License-Identifier: Apache-2.0
//
// Loops of the executor, for tests that count who runs what.
#include "cpu/executor.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tests/threads.h"

namespace {

using jax_layout::Executor;
using jax_layout::Threads;

// A pool too busy to start anything before the caller is done.
class Busy final : public Executor {
 public:
  explicit Busy(int num_threads) : num_threads_(num_threads) {}
  ~Busy() override { RunLate(); }
  int num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> task) const override {
    late_.push_back(std::move(task));
  }
  void RunLate() const {
    for (auto& task : late_) task();
    late_.clear();
  }

 private:
  int num_threads_;
  mutable std::vector<std::function<void()>> late_;
};

template <typename Run>
void WithPool(int64_t kind, int num_threads, const Run& run) {
  if (kind == 2) return run(Busy(num_threads));
  run(Threads(num_threads, kind == 1));
}

}  // namespace

extern "C" {

// counts[i]: how often i was run. Returns how many calls ran at a time for one
// worker, at most, or -1 if one was not in [0, workers).
int64_t Workers(int64_t kind, int64_t num_threads, int64_t n, int64_t workers,
                int64_t* counts) {
  std::vector<std::atomic<int64_t>> seen(n), inside(workers);
  std::atomic<int64_t> most{0};
  std::atomic<bool> strange{false};
  WithPool(kind, static_cast<int>(num_threads), [&](const Executor& executor) {
    executor.ParallelForWorkers(n, workers, [&](int64_t i, int64_t worker) {
      if (worker < 0 || worker >= workers) {
        strange = true;
        return;
      }
      const int64_t now = inside[worker].fetch_add(1) + 1;
      for (int64_t old = most; old < now;) most.compare_exchange_weak(old, now);
      ++seen[i];
      --inside[worker];
    });
    for (int64_t i = 0; i < n; ++i) counts[i] = seen[i];
  });
  return strange ? -1 : most.load();
}

// counts[i]: in how many parts i was. Returns the length of the longest less
// that of the shortest.
int64_t Parts(int64_t kind, int64_t num_threads, int64_t n, int64_t most,
              int64_t* counts) {
  std::vector<std::atomic<int64_t>> seen(n);
  std::atomic<int64_t> longest{0}, shortest{n};
  WithPool(kind, static_cast<int>(num_threads), [&](const Executor& executor) {
    executor.ParallelForParts(n, most, [&](int64_t begin, int64_t end) {
      const int64_t length = end - begin;
      for (int64_t old = longest; old < length;)
        longest.compare_exchange_weak(old, length);
      for (int64_t old = shortest; old > length;)
        shortest.compare_exchange_weak(old, length);
      for (int64_t i = begin; i < end; ++i) ++seen[i];
    });
    for (int64_t i = 0; i < n; ++i) counts[i] = seen[i];
  });
  return n == 0 ? 0 : longest - shortest;
}

// first[w]: what worker w runs first, if all begin at the same time.
void Firsts(int64_t workers, int64_t n, int64_t* first) {
  std::vector<std::atomic<int64_t>> firsts(workers);
  for (auto& i : firsts) i = -1;
  std::atomic<int64_t> begun{0};
  const Threads threads(static_cast<int>(workers));
  threads.ParallelForWorkers(n, workers, [&](int64_t i, int64_t worker) {
    if (firsts[worker] >= 0) return;
    firsts[worker] = i;
    ++begun;
    while (begun < workers) std::this_thread::yield();
  });
  for (int64_t w = 0; w < workers; ++w) first[w] = firsts[w];
}

}  // extern "C"
