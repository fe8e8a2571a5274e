// SPDX-License-Identifier: Apache-2.0
//
// OpenBLAS, from the package scipy-openblas32, whose names begin with scipy_
// and whose integers have 32 bits.
#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <complex>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>

#include "cpu/gemm/libraries.h"
#include "cpu/gemm/tiles.h"
#include "cpu/isa.h"
#include "cpu/libraries.h"

namespace jax_layout {
namespace {

// As in cblas.h.
constexpr int kColMajor = 102, kNoTrans = 111, kTrans = 112;
template <class Scalar, class T>
using GemmOf = void(int order, int trans_a, int trans_b, int m, int n, int k,
                    Scalar alpha, const T* a, int lda, const T* b, int ldb,
                    Scalar beta, T* c, int ldc);

struct Openblas {
  GemmOf<float, float>* sgemm = nullptr;
  GemmOf<double, double>* dgemm = nullptr;
  GemmOf<const void*, void>* cgemm = nullptr;
  GemmOf<const void*, void>* zgemm = nullptr;
  char* (*get_corename)() = nullptr;

  bool loaded() const { return zgemm != nullptr; }
};

// The kernels that the library has for x86-64, by the names it takes and gives.
struct Core {
  const char* name;
  Isa isa;
};
constexpr Core kCores[] = {
    {"SapphireRapids", Isa::kAmx}, {"Cooperlake", Isa::kAvx512Bf16},
    {"SkylakeX", Isa::kAvx512},    {"Haswell", Isa::kAvx2},
    {"Zen", Isa::kAvx2},           {"Sandybridge", Isa::kAvx2},  // AVX alone
    {"Prescott", Isa::kPortable},
};

bool IsCapped(const Openblas& blas) {
  const std::string name = blas.get_corename();
  const auto* core = std::ranges::find(kCores, name, &Core::name);
  return core == std::end(kCores) || core->isa <= MaxIsa();
}

Openblas Open(const char* path, void** library) {
  Openblas blas;
  *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*library == nullptr) return blas;
  auto find = [library]<class F>(const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(*library, name));
    return function != nullptr;
  };
  void (*set_num_threads)(int) = nullptr;
  if (!find("scipy_openblas_set_num_threads", set_num_threads) ||
      !find("scipy_openblas_get_corename", blas.get_corename) ||
      !find("scipy_cblas_sgemm", blas.sgemm) ||
      !find("scipy_cblas_dgemm", blas.dgemm) ||
      !find("scipy_cblas_cgemm", blas.cgemm) ||
      !find("scipy_cblas_zgemm", blas.zgemm)) {
    return {};
  }
  set_num_threads(1);  // this copy is ours: SciPy and NumPy bundle their own
  return blas;
}

// Takes a variable from the process while it lives, or gives it another value.
class Variable {
 public:
  explicit Variable(const char* name) : name_(name) {
    if (const char* value = std::getenv(name)) before_ = value;
    unsetenv(name);
  }
  ~Variable() {
    before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

  void Set(const char* value) { setenv(name_, value, 1); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

Openblas Load() {
  const char* path = LibraryPaths().openblas.c_str();
  if (*path == '\0') return {};
  // Which kernels and blocks it takes, variables tell it that it reads when
  // loaded. Those of others would give this copy less than what the tables of
  // choices were measured with: 0.3 of XLA's speed for 1.1.
  Variable core("OPENBLAS_CORETYPE"), cache("OPENBLAS_L2_SIZE");
  void* library = nullptr;
  Openblas blas = Open(path, &library);
  if (!blas.loaded() || IsCapped(blas)) return blas;
  dlclose(library);
  core.Set(std::ranges::find_if(kCores, [](const Core& known) {
             return known.isa <= BestIsa();
           })->name);
  blas = Open(path, &library);
  // Another's copy stays as it is.
  return blas.loaded() && IsCapped(blas) ? blas : Openblas{};
}

const Openblas& Library() {
  static const Openblas blas = Load();
  return blas;
}

void Product(const Openblas& blas, const GemmProblem& problem,
             const GemmTile& tile) {
  const GemmPlan& plan = problem.plan;
  // A row-major matrix is the column-major transpose: y^T = b^T a^T.
  const int trans_a = plan.b.transposed ? kTrans : kNoTrans;
  const int trans_b = plan.a.transposed ? kTrans : kNoTrans;
  const int m = static_cast<int>(tile.cols), n = static_cast<int>(tile.rows);
  const int k = static_cast<int>(plan.k);
  // With one row or column a stride may be less than BLAS asks for.
  auto ld = [](const GemmMatrix& matrix, int64_t rows, int64_t cols) {
    return static_cast<int>(
        std::max(matrix.ld, matrix.transposed ? rows : cols));
  };
  const int lda = ld(plan.b, plan.k, tile.cols);
  const int ldb = ld(plan.a, tile.rows, plan.k);
  const int ldc = ld(plan.y, tile.rows, tile.cols);
  auto call = [&]<class Scalar, class T>(GemmOf<Scalar, T>* gemm, Scalar alpha,
                                         Scalar beta, T* y) {
    gemm(kColMajor, trans_a, trans_b, m, n, k, alpha,
         reinterpret_cast<const T*>(tile.b), lda,
         reinterpret_cast<const T*>(tile.a), ldb, beta, y, ldc);
  };
  const std::complex<double> alpha = problem.alpha, beta = problem.beta;
  const std::complex<float> alpha32(alpha), beta32(beta);
  switch (problem.operands) {
    case DType::kF32:
      return call(blas.sgemm, alpha32.real(), beta32.real(),
                  reinterpret_cast<float*>(tile.y));
    case DType::kF64:
      return call(blas.dgemm, alpha.real(), beta.real(),
                  reinterpret_cast<double*>(tile.y));
    case DType::kC64:
      return call(blas.cgemm, static_cast<const void*>(&alpha32),
                  static_cast<const void*>(&beta32),
                  static_cast<void*>(tile.y));
    default:
      return call(blas.zgemm, static_cast<const void*>(&alpha),
                  static_cast<const void*>(&beta), static_cast<void*>(tile.y));
  }
}

}  // namespace

std::string OpenblasTarget() {
  return Library().loaded() ? Library().get_corename() : "";
}

bool OpenblasSupports(const GemmProblem& problem) {
  const GemmPlan& plan = problem.plan;
  const bool types =
      problem.operands == problem.result &&
      (problem.operands == DType::kF32 || problem.operands == DType::kF64 ||
       problem.operands == DType::kC64 || problem.operands == DType::kC128);
  const int64_t largest =
      std::max({plan.m, plan.n, plan.k, plan.a.ld, plan.b.ld, plan.y.ld});
  return types && largest <= INT_MAX && Library().loaded();
}

Status ChooseOpenblas(const GemmProblem& problem, GemmFunction* run) {
  // One tile of whole rows per thread: OpenBLAS packs b once per tile, and
  // columns cut short cost more. GFLOP/s for f64 on two threads: 2048^3 in
  // tiles of 1024 x 2048 187, 512 x 2048 174, 1024 x 1024 174, 2048 x 1024 178;
  // 512^3 in 256 x 512 154, 128 x 512 149, 256 x 256 144, of XLA's 161.
  const GemmTiling tiling = MakeGemmTiling(problem.plan, {.tasks_per_thread = 1,
                                                          .min_rows = 64,
                                                          .min_cols = 64,
                                                          .rows_first = true});
  const bool finish = problem.bias || problem.aux ||
                      problem.activation != Activation::kNone ||
                      problem.derivative != Activation::kNone;
  *run = [=](const GemmBuffers& buffers, const Executor& executor) {
    return ForEachGemmTile(problem, tiling, buffers, executor,
                           [&](const GemmTile& tile) {
                             Product(Library(), problem, tile);
                             const int64_t ld = problem.plan.y.ld;
                             if (finish) {
                               FinishGemm(problem, 1, 0,
                                          {tile.rows, tile.cols, tile.y, ld,
                                           tile.bias, tile.y, tile.aux, ld});
                             }
                             return Status::Ok();
                           });
  };
  return Status::Ok();
}

}  // namespace jax_layout
