// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_CACHES_H_
#define JAX_LAYOUT_CPU_CACHES_H_

#include <unistd.h>

#include <cstdint>

namespace jax_layout {

// Bytes of a core's caches, or what the smallest have where the system does not
// say.
struct Caches {
  int64_t l1 = 32 << 10;
  int64_t l2 = 512 << 10;
};

inline const Caches& CachesOfCore() {
  static const Caches caches = [] {
    Caches found;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    const auto take = [](int name, int64_t& bytes) {
      const int64_t said = sysconf(name);
      if (said > 0) bytes = said;
    };
    take(_SC_LEVEL1_DCACHE_SIZE, found.l1);
    take(_SC_LEVEL2_CACHE_SIZE, found.l2);
#endif
    return found;
  }();
  return caches;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CACHES_H_
