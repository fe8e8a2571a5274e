// SPDX-License-Identifier: Apache-2.0
//
// Where the handlers meet the CPU backend.
#ifndef JAX_LAYOUT_CPU_PLATFORM_H_
#define JAX_LAYOUT_CPU_PLATFORM_H_

#include <utility>

#include "cpu/executor.h"
#include "xla/ffi/api/ffi.h"

namespace jax_layout {

constexpr bool kSharesMemory = true;  // a handler reads what operands hold

struct ExecutorContext {
  using Tag = ::xla::ffi::ThreadPool;
  using Type = ::xla::ffi::ThreadPool;
};

class XlaThreadPool final : public Executor {
 public:
  explicit XlaThreadPool(::xla::ffi::ThreadPool pool) : pool_(pool) {}
  int num_threads() const override {
    return static_cast<int>(pool_.num_threads());
  }
  void Schedule(std::function<void()> task) const override {
    pool_.Schedule(std::move(task));
  }

 private:
  mutable ::xla::ffi::ThreadPool pool_;
};

inline XlaThreadPool ToExecutor(::xla::ffi::ThreadPool pool) {
  return XlaThreadPool(pool);
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_PLATFORM_H_
