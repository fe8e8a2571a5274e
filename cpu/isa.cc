// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>

#include "cpu/executor.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_layout {
namespace {

#if defined(__x86_64__) && !defined(JAX_LAYOUT_TILES_ON_HOST)
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

// What falls to the processors of this process of AMD's third-level caches,
// each of which a few cores have to themselves; 0 for others.
int64_t ThirdLevelBytes() {
#ifdef __x86_64__
  constexpr unsigned kTopologyExtensions = 1 << 22, kLeaf = 0x8000001d;
  unsigned a, b, c, d;
  if (!__get_cpuid(0x80000001, &a, &b, &c, &d)) return 0;
  if ((c & kTopologyExtensions) == 0) return 0;
  for (unsigned i = 0; __get_cpuid_count(kLeaf, i, &a, &b, &c, &d); ++i) {
    const unsigned type = a & 31, level = a >> 5 & 7;
    if (type == 0) break;
    if (level != 3) continue;
    const int64_t line = (b & 0xfff) + 1, partitions = (b >> 12 & 0x3ff) + 1;
    const int64_t ways = (b >> 22) + 1, sets = int64_t{c} + 1;
    const int64_t sharing = (a >> 14 & 0xfff) + 1;
    return line * partitions * ways * sets / sharing * ProcessorCount();
  }
#endif
  return 0;
}

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
#ifdef JAX_LAYOUT_TILES_ON_HOST  // tests, whose tiles are software
      return Has(Isa::kAvx512Bf16);
#else
      return Has(Isa::kAvx512Bf16) && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") && TilesPermitted();
#endif
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

// Whether vdpbf16ps does the work of two fused multiply-adds sooner than they.
// AMD's starts as often as they do. Intel's, on an Emerald Rapids, takes four
// times as long: half as many products a second as in f32.
bool HasFastPairs() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
#else
  return false;
#endif
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

Isa BestIsaWithoutTiles() {
  static const Isa isa = HighestUpTo(
      std::min(MaxIsa(), HasFastPairs() ? Isa::kAvx512Bf16 : Isa::kAvx512));
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

int64_t StreamBytes() {
  // On a Xeon, whose last level lies behind a mesh, it pays from here on.
  constexpr int64_t kLeast = 12 << 20;
  // As much is read as is written.
  static const int64_t bytes = std::max(kLeast, ThirdLevelBytes() / 2);
  return bytes;
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

const char* KernelLevels::best() const {
  const int level = Find(BestIsa());
  const bool tiles = level >= 0 && levels_[level].isa == Isa::kAmx;
  return NameOf(tiles ? level : Find(BestIsaWithoutTiles()));
}

}  // namespace jax_layout
