// SPDX-License-Identifier: Apache-2.0
//
// OpenBLAS, from the package scipy-openblas32, whose names begin with scipy_
// and whose integers have 32 bits.
#include <dlfcn.h>

#include <climits>
#include <complex>
#include <cstdlib>
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

// While it lives, a library that is loaded takes the kernels of BestIsa(), not
// the processor's best. OpenBLAS has no other way to tell it, and reads this
// once. Only in a process that is capped: another thread may read the
// environment meanwhile.
class OpenblasCap {
 public:
  OpenblasCap() {
    if (MaxIsa() == Isa::kAmx) return;
    const char* before = std::getenv(kVariable);
    if (before != nullptr) before_ = before;
    was_set_ = before != nullptr;
    setenv(kVariable, Core(BestIsa()), 1);
  }
  ~OpenblasCap() {
    if (MaxIsa() == Isa::kAmx) return;
    was_set_ ? setenv(kVariable, before_.c_str(), 1) : unsetenv(kVariable);
  }
  OpenblasCap(const OpenblasCap&) = delete;
  OpenblasCap& operator=(const OpenblasCap&) = delete;

 private:
  static constexpr const char* kVariable = "OPENBLAS_CORETYPE";

  static const char* Core(Isa isa) {
    switch (isa) {
      case Isa::kAvx2:
        return "Haswell";
      case Isa::kAvx512:
        return "SkylakeX";
      case Isa::kAvx512Bf16:
        return "Cooperlake";
      case Isa::kAmx:
        return "SapphireRapids";
      default:
#ifdef __aarch64__
        return "ARMV8";
#else
        return "Prescott";  // SSE3
#endif
    }
  }

  std::string before_;
  bool was_set_ = false;
};

Openblas Load() {
  Openblas blas;
  const std::string& path = LibraryPaths().openblas;
  if (path.empty()) return blas;
  const OpenblasCap cap;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return blas;
  auto find = [library]<class F>(const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
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
