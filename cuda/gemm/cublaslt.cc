// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/cublaslt.h"

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <type_traits>

namespace jax_layout::lt {
namespace {

Status Open(const char* path, Library* library) {
  void* file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    return Status::Error(std::string("gemm: cannot load cuBLASLt: ") +
                         dlerror() + ".");
  }
  std::string missing;
  const auto find = [&](const char* name, auto* entry) {
    void* symbol = dlsym(file, name);
    if (symbol == nullptr) missing = name;
    *entry = reinterpret_cast<std::remove_pointer_t<decltype(entry)>>(symbol);
  };
  find("cublasLtCreate", &library->Create);
  find("cublasLtGetStatusName", &library->GetStatusName);
  find("cublasLtGetVersion", &library->GetVersion);
  find("cublasLtMatmulDescCreate", &library->MatmulDescCreate);
  find("cublasLtMatmulDescDestroy", &library->MatmulDescDestroy);
  find("cublasLtMatmulDescSetAttribute", &library->MatmulDescSetAttribute);
  find("cublasLtMatrixLayoutCreate", &library->MatrixLayoutCreate);
  find("cublasLtMatrixLayoutDestroy", &library->MatrixLayoutDestroy);
  find("cublasLtMatrixLayoutSetAttribute", &library->MatrixLayoutSetAttribute);
  find("cublasLtMatmulPreferenceCreate", &library->MatmulPreferenceCreate);
  find("cublasLtMatmulPreferenceDestroy", &library->MatmulPreferenceDestroy);
  find("cublasLtMatmulPreferenceSetAttribute",
       &library->MatmulPreferenceSetAttribute);
  find("cublasLtMatmulAlgoGetHeuristic", &library->MatmulAlgoGetHeuristic);
  find("cublasLtMatmulAlgoCheck", &library->MatmulAlgoCheck);
  find("cublasLtMatmul", &library->Matmul);
  if (!missing.empty()) {
    return Status::Error("gemm: " + std::string(path) + " has no " + missing +
                         ".");
  }
  return Status::Ok();
}

}  // namespace

Status Load(const Library** library, const char* path) {
  static std::mutex mutex;
  static Library loaded;
  static bool is_loaded = false;
  std::lock_guard lock(mutex);
  if (!is_loaded) {
    Status status = Open(path, &loaded);
    if (!status.ok()) return status;
    is_loaded = true;
  }
  *library = &loaded;
  return Status::Ok();
}

}  // namespace jax_layout::lt
