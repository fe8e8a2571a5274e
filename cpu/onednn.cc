// SPDX-License-Identifier: Apache-2.0
#if __has_include(<oneapi/dnnl/dnnl.h>)
#include "cpu/onednn.h"

#include <dlfcn.h>

#include <string>

#include "cpu/isa.h"
#include "cpu/libraries.h"

namespace jax_layout {
namespace {

// Opens a library; its version in *version, 0 for what cannot be used.
Onednn Open(const char* path, int* version) {
  Onednn dnnl;
  *version = 0;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dnnl;
  bool complete = true;
  auto find = [&]<class F>(const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    complete &= function != nullptr;
  };
#define X(name) find("dnnl_" #name, dnnl.name);
  JAX_LAYOUT_ONEDNN_FUNCTIONS(X)
#undef X
  if (complete && dnnl.version()->major == DNNL_VERSION_MAJOR) {
    const unsigned runtime = dnnl.version()->cpu_runtime;
    if (runtime == DNNL_RUNTIME_OMP) {
      find("omp_get_max_threads", dnnl.omp_get_max_threads);
      find("omp_set_num_threads", dnnl.omp_set_num_threads);
    }
    // Others would bring a thread pool of their own.
    if (complete &&
        (runtime == DNNL_RUNTIME_OMP || runtime == DNNL_RUNTIME_SEQ)) {
      *version = dnnl.version()->minor * 1000 + dnnl.version()->patch + 1;
    }
  }
  if (*version == 0) dlclose(library);
  return dnnl;
}

// The level in the library's terms. Processors with AVX-512 and without bf16
// have VNNI, but for the first.
dnnl_cpu_isa_t OnednnIsa(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
    case Isa::kNeon:
      return dnnl_cpu_isa_sse41;
    case Isa::kAvx2:
      return dnnl_cpu_isa_avx2;
    case Isa::kAvx512:
      return dnnl_cpu_isa_avx512_core_vnni;
    case Isa::kAvx512Bf16:
      return dnnl_cpu_isa_avx512_core_bf16;
    default:
      return dnnl_cpu_isa_default;
  }
}

// Whether the library keeps to MaxIsa(); it refuses if it has been used.
bool Cap([[maybe_unused]] const Onednn& dnnl) {
#ifdef __x86_64__
  return MaxIsa() == Isa::kAmx ||
         dnnl.set_max_cpu_isa(OnednnIsa(MaxIsa())) == dnnl_success;
#else
  return true;  // it has names for x86-64 alone
#endif
}

Onednn Load() {
  // The one that the loader knows, if it is newer than the package's.
  int version = 0, known_version = 0;
  Onednn dnnl;
  const std::string& path = LibraryPaths().onednn;
  if (!path.empty()) dnnl = Open(path.c_str(), &version);
  const Onednn known = Open("libdnnl.so.3", &known_version);
  if (known_version > version) {
    dnnl = known;
    version = known_version;
  }
  if (version == 0 || !Cap(dnnl) ||
      dnnl.engine_create(&dnnl.engine, dnnl_cpu, 0) != dnnl_success) {
    return {};
  }
  return dnnl;
}

}  // namespace

const Onednn& OnednnLibrary() {
  static const Onednn dnnl = Load();
  return dnnl;
}

bool OnednnSumsInt8() {
#ifdef __x86_64__
  const int isa = OnednnLibrary().get_effective_cpu_isa();
  const auto has = [isa](int wanted) { return (isa & wanted) == wanted; };
  return has(dnnl_cpu_isa_avx2_vnni) || has(dnnl_cpu_isa_avx512_core_vnni);
#else
  return true;
#endif
}

dnnl_data_type_t OnednnType(DType type) {
  switch (type) {
    case DType::kF32:
      return dnnl_f32;
    case DType::kBF16:
      return dnnl_bf16;
    case DType::kF16:
      return dnnl_f16;
    case DType::kS8:
      return dnnl_s8;
    case DType::kS32:
      return dnnl_s32;
    default:
      return dnnl_data_type_undef;
  }
}

}  // namespace jax_layout

#endif
