// SPDX-License-Identifier: Apache-2.0
//
// The kernels of cpu/ against plain loops, without Python and without JAX, so
// that they can be tested on processors that only an emulator has.
//
//   checks LEVEL NAME...
//
// LEVEL is the one that must run (JAX_LAYOUT_MAX_ISA caps it).
#include <cstdio>
#include <cstring>

#include "cpu/isa.h"
#include "tests/arm/check.h"

using namespace jax_layout;

int main(int count, char** arguments) {
  constexpr struct {
    const char* name;
    void (*check)();
  } kAll[] = {
      {"permute", CheckPermute}, {"depthwise", CheckDepthwise},
      {"grouped", CheckGrouped}, {"winograd", CheckWinograd},
      {"matvec", CheckMatvec},   {"skinny", CheckSkinny},
      {"blocked", CheckBlocked}, {"finish", CheckFinish},
      {"moments", CheckMoments}, {"index", CheckIndex},
      {"geam", CheckGeam},       {"attention", CheckAttention},
      {"pool", CheckPool},
  };
  const char* const level = Name(BestIsa());
  if (count < 3 || std::strcmp(level, arguments[1]) != 0) {
    std::printf("checks LEVEL NAME...: the level here is %s\n", level);
    return 2;
  }
  bool ok = true;
  for (int i = 2; i < count; ++i) {
    bool known = false;
    for (const auto& [name, check] : kAll) {
      if (std::strcmp(name, arguments[i]) != 0) continue;
      known = true;
      checks = failures = 0;
      check();
      std::printf("%s: %s, %lld of %lld wrong\n", level, name,
                  static_cast<long long>(failures),
                  static_cast<long long>(checks));
    }
    ok = ok && known && checks > 0 && failures == 0;
  }
  return ok ? 0 : 1;
}
