// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_LIBRARIES_H_
#define JAX_LAYOUT_CPU_LIBRARIES_H_

#include <string>

namespace jax_layout {

// Where the libraries are that are found at run time; empty where they are not.
// To be set before the first use of a method, which loads them.
struct Libraries {
  std::string onednn, openblas;
};
inline Libraries& LibraryPaths() {
  static Libraries paths;
  return paths;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_LIBRARIES_H_
