// SPDX-License-Identifier: Apache-2.0
//
// The one place that knows the processor. Kernels are made at levels, and what
// runs is chosen here, below what JAX_LAYOUT_MAX_ISA allows.
#ifndef JAX_LAYOUT_CPU_ISA_H_
#define JAX_LAYOUT_CPU_ISA_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <type_traits>

namespace jax_layout {

// Levels of instruction sets: portable is any processor, neon AArch64; the
// others are x86-64, each with those before it.
//   avx2         fma, f16c
//   avx512       f, bw, dq, vl
//   avx512_bf16
//   amx          tiles of bf16, and Linux's permission to use them
enum class Isa { kPortable, kNeon, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr const char* kIsaNames[] = {"portable", "neon",        "avx2",
                                            "avx512",   "avx512_bf16", "amx"};
inline const char* Name(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

// The level that the processor has.
Isa ProcessorIsa();

// The one that JAX_LAYOUT_MAX_ISA names, the highest if it is not set. Read
// once.
Isa MaxIsa();

// What the variable says, if that is no level; "" if all is well. Nothing may
// run then.
const std::string& UnknownMaxIsa();

// The level of what runs: the processor's, at most MaxIsa().
Isa BestIsa();

// The same of products without tiles: those of bf16 in pairs stay aside where
// the processor multiplies a pair no faster than two floats.
Isa BestIsaWithoutTiles();

// Whether an AVX-512 processor has byte permutes too: those of Skylake, Cascade
// Lake and Cooper Lake, the last with bf16, do not.
bool HasVbmi();

// Larger results leave by non-temporal stores: they would leave the cache
// anyway, and writing around it saves reading every line first.
int64_t StreamBytes();

// The levels of one kind of kernels, as the module reports them. It owns no
// memory: threads may run kernels while the process ends.
class KernelLevels {
 public:
  static constexpr int kMost = std::size(kIsaNames);

  explicit KernelLevels(const char* name);

  void Add(Isa isa, bool (*also)()) { levels_[count_++] = {isa, also}; }
  // The first level up to `isa` that this processor has, or -1.
  int Find(Isa isa) const;
  // Written when it changes alone: all threads read the cache line.
  void Ran(int level) const {
    if (ran_.load(std::memory_order_relaxed) == level) return;
    ran_.store(level, std::memory_order_relaxed);
  }

  const char* name() const { return name_; }
  // Those that run unless a test asks for others.
  const char* best() const;
  const char* ran() const { return NameOf(ran_.load()); }
  const KernelLevels* next() const { return next_; }
  static const KernelLevels* First();

 private:
  struct Level {
    Isa isa;
    bool (*also)();
  };
  const char* NameOf(int level) const {
    return level < 0 ? "" : Name(levels_[level].isa);
  }

  const char* name_;
  Level levels_[kMost] = {};
  int count_ = 0;
  mutable std::atomic<int> ran_ = -1;
  const KernelLevels* next_;
};

// Kernels of one kind, the highest level first; T is a pointer. One place for
// each: what a new level needs is a line here.
//
//   const Kernels<F*> kKernels("name", {{Isa::kAvx2, FAvx2},
//                                       {Isa::kPortable, F}});
template <class T>
class Kernels {
 public:
  struct AtLevel {
    Isa isa;
    T kernels;
    bool (*also)() = nullptr;  // what else the processor must have
  };

  Kernels(const char* name, std::initializer_list<AtLevel> highest_first)
      : levels_(name) {
    int count = 0;
    for (const AtLevel& level : highest_first) {
      kernels_[count++] = level.kernels;
      levels_.Add(level.isa, level.also);
    }
  }

  // Those for a level, null if there are none.
  T At(Isa isa = BestIsa()) const { return Of(levels_.Find(isa)); }
  // The same, to run them.
  T Take(Isa isa = BestIsa()) const {
    const int level = levels_.Find(isa);
    levels_.Ran(level);
    return Of(level);
  }

 private:
  T Of(int level) const { return level < 0 ? nullptr : kernels_[level]; }

  KernelLevels levels_;
  T kernels_[KernelLevels::kMost] = {};
};
static_assert(std::is_trivially_destructible_v<Kernels<void*>>);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ISA_H_
