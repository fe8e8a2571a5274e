// SPDX-License-Identifier: Apache-2.0
#include "emulation.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMULATION_ASAN 1
#else
#define EMULATION_ASAN 0
#endif

emulation::Index threadIdx, blockIdx;
dim3 blockDim, gridDim;

// What a block gets without asking the driver for more. The kernels declare it
// as an array of unknown size.
constexpr size_t kSharedBytes = 48 << 10;
namespace jax_layout {
extern uint4 shared_memory[];
uint4 shared_memory[kSharedBytes / sizeof(uint4)];
}  // namespace jax_layout

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kWarp = 32;

enum class At { kReady, kBarrier, kShuffle, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* fake_stack = nullptr;
  At at = At::kDone;
  const void* where = nullptr;  // the barrier's call site
  unsigned long long value = 0;
  unsigned mask = 0;
};

struct State {
  Order order;
  Memory memory = {.size = INT64_MAX};  // the host's, till there is another
  Sample sample;
  std::string error;

  std::vector<Fiber> fibers;
  unsigned threads = 0, current = 0;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* scheduler_fake_stack = nullptr;
  const std::function<void()>* body = nullptr;
  std::mt19937_64 random;
} state;

void StartSwitch([[maybe_unused]] void** save, [[maybe_unused]] const void* to,
                 [[maybe_unused]] size_t bytes) {
#if EMULATION_ASAN
  __sanitizer_start_switch_fiber(save, to, bytes);
#endif
}

void FinishSwitch([[maybe_unused]] void* fake,
                  [[maybe_unused]] const void** from,
                  [[maybe_unused]] size_t* bytes) {
#if EMULATION_ASAN
  __sanitizer_finish_switch_fiber(fake, from, bytes);
#endif
}

// From a fiber back to the scheduler.
void Leave(At at) {
  Fiber& fiber = state.fibers[state.current];
  fiber.at = at;
  StartSwitch(at == At::kDone ? nullptr : &fiber.fake_stack,
              state.scheduler_stack, state.scheduler_stack_bytes);
  swapcontext(&fiber.context, &state.scheduler);
  FinishSwitch(fiber.fake_stack, &state.scheduler_stack,
               &state.scheduler_stack_bytes);
}

void Main() {
  FinishSwitch(nullptr, &state.scheduler_stack, &state.scheduler_stack_bytes);
  (*state.body)();
  Leave(At::kDone);
}

void Resume(unsigned thread) {
  state.current = thread;
  threadIdx = {thread, 0, 0};
  Fiber& fiber = state.fibers[thread];
  StartSwitch(&state.scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  swapcontext(&state.scheduler, &fiber.context);
  FinishSwitch(state.scheduler_fake_stack, nullptr, nullptr);
}

// Lets go of a warp whose shuffle is complete.
bool ReleaseShuffles() {
  bool released = false;
  for (unsigned first = 0; first < state.threads; first += kWarp) {
    unsigned here = 0, wanted = 0;
    for (unsigned lane = 0; lane < kWarp && first + lane < state.threads;
         ++lane) {
      const Fiber& fiber = state.fibers[first + lane];
      if (fiber.at != At::kShuffle) continue;
      here |= 1u << lane;
      wanted |= fiber.mask;
    }
    if (here == 0 || here != wanted) continue;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (here >> lane & 1) state.fibers[first + lane].at = At::kReady;
    }
    released = true;
  }
  return released;
}

bool ReleaseBarrier() {
  const void* where = nullptr;
  unsigned waiting = 0;
  for (unsigned t = 0; t < state.threads; ++t) {
    const Fiber& fiber = state.fibers[t];
    if (fiber.at != At::kBarrier) continue;
    if (waiting++ > 0 && fiber.where != where) {
      Fail("threads of a block wait at different barriers");
      return false;
    }
    where = fiber.where;
  }
  if (waiting != state.threads) return false;
  for (unsigned t = 0; t < state.threads; ++t) {
    state.fibers[t].at = At::kReady;
  }
  return true;
}

void RunBlock([[maybe_unused]] size_t shared_bytes) {
  char* shared = reinterpret_cast<char*>(jax_layout::shared_memory);
#if EMULATION_ASAN
  __asan_unpoison_memory_region(shared, kSharedBytes);
#endif
  std::memset(shared, 0xA5, kSharedBytes);
#if EMULATION_ASAN
  __asan_poison_memory_region(shared + shared_bytes,
                              kSharedBytes - shared_bytes);
#endif
  if (state.fibers.size() < state.threads) state.fibers.resize(state.threads);
  std::vector<unsigned> turn(state.threads);
  for (unsigned t = 0; t < state.threads; ++t) {
    Fiber& fiber = state.fibers[t];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    fiber.fake_stack = nullptr;
    makecontext(&fiber.context, Main, 0);
    fiber.at = At::kReady;
    turn[t] = state.order.kind == Order::kReversed ? state.threads - 1 - t : t;
  }
  for (;;) {
    if (state.order.kind == Order::kShuffled) {
      std::shuffle(turn.begin(), turn.end(), state.random);
    }
    bool ran = false;
    for (unsigned t : turn) {
      if (state.fibers[t].at != At::kReady) continue;
      Resume(t);
      ran = true;
    }
    if (ran || ReleaseShuffles() || ReleaseBarrier()) continue;
    for (unsigned t = 0; t < state.threads; ++t) {
      if (state.fibers[t].at != At::kDone) {
        Fail("a barrier or shuffle was not reached by all threads");
      }
    }
    break;
  }
#if EMULATION_ASAN
  __asan_unpoison_memory_region(shared, kSharedBytes);
#endif
}

// The offset of an access that must be aligned and inside [base, base + size).
bool Inside(const char* what, const void* address, const char* base,
            int64_t size, size_t bytes, int64_t* offset) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  *offset = static_cast<int64_t>(at - reinterpret_cast<uintptr_t>(base));
  if (at % bytes != 0) {
    Fail(std::string("misaligned ") + what + " of " + std::to_string(bytes) +
         " bytes at offset " + std::to_string(*offset));
    return false;
  }
  if (*offset < 0 || *offset + static_cast<int64_t>(bytes) > size) {
    Fail(std::string(what) + " of " + std::to_string(bytes) +
         " bytes out of bounds at offset " + std::to_string(*offset));
    return false;
  }
  return true;
}

}  // namespace

__attribute__((noinline)) void SyncThreads() {
  state.fibers[state.current].where = __builtin_return_address(0);
  Leave(At::kBarrier);
}

unsigned long long Shuffle(unsigned mask, unsigned long long value, int lane) {
  Fiber& fiber = state.fibers[state.current];
  const unsigned first = state.current / kWarp * kWarp;
  if (!(mask >> (state.current % kWarp) & 1) || !(mask >> (lane & 31) & 1)) {
    Fail("a shuffle by or from a lane outside its mask");
    return 0;
  }
  fiber.value = value;
  fiber.mask = mask;
  Leave(At::kShuffle);
  const unsigned long long result = state.fibers[first + lane % kWarp].value;
  // Everyone has read before anyone offers the next value.
  Leave(At::kShuffle);
  return result;
}

void GlobalLoad(const void* from, void* to, size_t bytes) {
  int64_t offset;
  std::memset(to, 0, bytes);
  const char* base = state.memory.x;
  int64_t size = state.memory.size;
  for (const auto& [start, length] : state.memory.reads) {
    if (from < start) continue;
    const auto distance =
        reinterpret_cast<uintptr_t>(from) - reinterpret_cast<uintptr_t>(start);
    if (distance >= static_cast<uintptr_t>(length)) continue;
    base = static_cast<const char*>(start);
    size = length;
  }
  if (!Inside("load", from, base, size, bytes, &offset)) return;
  if (state.memory.load) {
    state.memory.load(offset, static_cast<char*>(to), bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void GlobalStore(void* to, const void* from, size_t bytes) {
  int64_t offset;
  if (!Inside("store", to, state.memory.y, state.memory.size, bytes, &offset)) {
    return;
  }
  if (state.memory.store) {
    state.memory.store(offset, static_cast<const char*>(from), bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

cudaError_t Launch(const cudaLaunchConfig_t& config,
                   const std::function<void()>& thread) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.x < 1 || grid.x > INT32_MAX || grid.y != 1 || grid.z != 1 ||
      block.x < 1 || block.x > 1024 || block.y != 1 || block.z != 1 ||
      config.dynamicSmemBytes > kSharedBytes) {
    return cudaErrorInvalidConfiguration;
  }
  gridDim = grid;
  blockDim = block;
  state.threads = block.x;
  state.body = &thread;
  state.random.seed(state.order.seed);
  std::vector<int64_t> blocks;
  if (state.sample.count == 0) {
    for (int64_t b = 0; b < grid.x; ++b) blocks.push_back(b);
  } else {
    if (state.sample.grid > 0) {
      gridDim = dim3(static_cast<unsigned>(state.sample.grid));
    }
    blocks = {0, gridDim.x - int64_t{1}};
    for (int k = 2; k < state.sample.count; ++k) {
      blocks.push_back(static_cast<int64_t>(state.random() % gridDim.x));
    }
  }
  for (int64_t b : blocks) {
    if (!state.error.empty()) break;
    blockIdx = {static_cast<unsigned>(b), 0, 0};
    RunBlock(config.dynamicSmemBytes);
  }
  return cudaSuccess;
}

void Configure(Order order, Memory memory, Sample sample) {
  state.order = order;
  state.memory = std::move(memory);
  state.sample = sample;
  state.error.clear();
}

int multiprocessors = 132;

namespace {
bool recording = false;
std::string recorded;
}  // namespace

bool Recording() { return recording; }

void Record(const cudaLaunchConfig_t& config, const void* kernel,
            const std::vector<std::string>& args) {
  Dl_info library = {};
  dladdr(reinterpret_cast<const void*>(&Record), &library);
  const auto offset = reinterpret_cast<uintptr_t>(kernel) -
                      reinterpret_cast<uintptr_t>(library.dli_fbase);
  for (uint64_t n :
       {uint64_t{offset}, uint64_t{config.gridDim.x},
        uint64_t{config.blockDim.x}, uint64_t{config.dynamicSmemBytes}}) {
    recorded += std::to_string(n) + " ";
  }
  for (const std::string& arg : args) {
    for (const char c : arg) {
      recorded += "0123456789abcdef"[c >> 4 & 15];
      recorded += "0123456789abcdef"[c & 15];
    }
    recorded += " ";
  }
  recorded += "\n";
}

const std::string& Error() { return state.error; }

void Fail(const std::string& message) {
  if (state.error.empty()) {
    state.error = message + " (block " + std::to_string(blockIdx.x) +
                  ", thread " + std::to_string(threadIdx.x) + ")";
  }
}

}  // namespace emulation

extern "C" {

// Of the device; those of an H100 until told.
void set_multiprocessors(int count) { emulation::multiprocessors = count; }

// From here on launches are recorded, or run.
void record(bool on) {
  emulation::recording = on;
  emulation::recorded.clear();
}

// A line per launch: the kernel's place in this library, blocks, threads, bytes
// of shared memory, and the arguments in hexadecimal.
const char* recorded_launches() { return emulation::recorded.c_str(); }

}  // extern "C"
