// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_layout {
namespace {

#ifdef __x86_64__
// Linux gives a process the registers on demand: it enlarges the frames of
// signals. A sandbox may refuse.
bool TilesPermitted() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool Has(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
#ifdef __aarch64__
    case Isa::kNeon:
      return true;
#endif
#ifdef __x86_64__
    case Isa::kAvx2:
      __builtin_cpu_init();
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return Has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return Has(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return Has(Isa::kAvx512Bf16) && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") && TilesPermitted();
#endif
    default:
      return false;
  }
}

// The highest level up to one, and no question about those above.
Isa HighestUpTo(Isa isa) {
  while (!Has(isa)) isa = static_cast<Isa>(static_cast<int>(isa) - 1);
  return isa;
}

struct Variable {
  Isa max = Isa::kAmx;
  std::string unknown;
};

const Variable& MaxIsaVariable() {
  static const Variable variable = [] {
    Variable read;
    const char* text = std::getenv("JAX_LAYOUT_MAX_ISA");
    if (text == nullptr || *text == '\0') return read;
    std::string name = text;
    std::ranges::transform(name, name.begin(), [](unsigned char c) {
      return static_cast<char>(std::tolower(c));
    });
    const auto* found =
        std::find(std::begin(kIsaNames), std::end(kIsaNames), name);
    if (found == std::end(kIsaNames)) {
      return Variable{Isa::kPortable, text};
    }
    read.max = static_cast<Isa>(found - kIsaNames);
    return read;
  }();
  return variable;
}

const KernelLevels*& FirstLevels() {
  static const KernelLevels* first = nullptr;
  return first;
}

}  // namespace

Isa ProcessorIsa() {
  static const Isa isa = HighestUpTo(Isa::kAmx);
  return isa;
}

Isa MaxIsa() { return MaxIsaVariable().max; }

const std::string& UnknownMaxIsa() { return MaxIsaVariable().unknown; }

Isa BestIsa() {
  static const Isa isa = HighestUpTo(MaxIsa());
  return isa;
}

bool HasVbmi() {
#ifdef __x86_64__
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("bmi2");
  }();
  return has;
#else
  return false;
#endif
}

KernelLevels::KernelLevels(const char* name)
    : name_(name), next_(FirstLevels()) {
  FirstLevels() = this;
}

const KernelLevels* KernelLevels::First() { return FirstLevels(); }

int KernelLevels::Find(Isa isa) const {
  for (int i = 0; i < count_; ++i) {
    const Level& level = levels_[i];
    if (level.isa <= isa && (level.also == nullptr || level.also())) return i;
  }
  return -1;
}

}  // namespace jax_layout
