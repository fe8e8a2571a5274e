// SPDX-License-Identifier: Apache-2.0
//
// Compiles where cuda/gemm/cublaslt.h says what NVIDIA's header says.
#include <cublasLt.h>

#include <type_traits>

#include "cuda/gemm/cublaslt.h"

namespace lt = jax_layout::lt;

#define SAME(OURS, THEIRS) \
  static_assert(static_cast<int64_t>(OURS) == static_cast<int64_t>(THEIRS))

SAME(lt::kSuccess, CUBLAS_STATUS_SUCCESS);
SAME(lt::kR32F, CUDA_R_32F);
SAME(lt::kR64F, CUDA_R_64F);
SAME(lt::kR16F, CUDA_R_16F);
SAME(lt::kR8I, CUDA_R_8I);
SAME(lt::kC32F, CUDA_C_32F);
SAME(lt::kC64F, CUDA_C_64F);
SAME(lt::kR32I, CUDA_R_32I);
SAME(lt::kR16BF, CUDA_R_16BF);
SAME(lt::kR8FE4M3, CUDA_R_8F_E4M3);
SAME(lt::kR8FE5M2, CUDA_R_8F_E5M2);
SAME(lt::kCompute32F, CUBLAS_COMPUTE_32F);
SAME(lt::kCompute64F, CUBLAS_COMPUTE_64F);
SAME(lt::kCompute32I, CUBLAS_COMPUTE_32I);
SAME(lt::kCompute32FFastTF32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(lt::kNone, CUBLAS_OP_N);
SAME(lt::kTranspose, CUBLAS_OP_T);
SAME(lt::kDefault, CUBLASLT_EPILOGUE_DEFAULT);
SAME(lt::kRelu, CUBLASLT_EPILOGUE_RELU);
SAME(lt::kBias, CUBLASLT_EPILOGUE_BIAS);
SAME(lt::kReluBias, CUBLASLT_EPILOGUE_RELU_BIAS);
SAME(lt::kGelu, CUBLASLT_EPILOGUE_GELU);
SAME(lt::kGeluBias, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME(lt::kGeluAux, CUBLASLT_EPILOGUE_GELU_AUX);
SAME(lt::kGeluAuxBias, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(lt::kDGelu, CUBLASLT_EPILOGUE_DGELU);
SAME(lt::kBGradB, CUBLASLT_EPILOGUE_BGRADB);
SAME(lt::kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(lt::kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(lt::kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(lt::kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(lt::kAuxPointer, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(lt::kAuxLd, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(lt::kAuxBatchStride, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE);
SAME(lt::kScaleA, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME(lt::kScaleB, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME(lt::kScaleD, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER);
SAME(lt::kFastAccumulation, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
SAME(lt::kBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
SAME(lt::kBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
SAME(lt::kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(lt::kReductionSchemeMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(lt::kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(lt::kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(lt::kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(lt::kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(lt::kReduceComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(sizeof(lt::Algorithm), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(lt::HeuristicResult), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(lt::HeuristicResult, workspace_bytes),
     offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(lt::HeuristicResult, state),
     offsetof(cublasLtMatmulHeuristicResult_t, state));

// Each of our parameters is passed as theirs is: as big, and a pointer or not.
template <typename Ours, typename Theirs>
struct Alike;
template <typename R, typename... Ours, typename S, typename... Theirs>
struct Alike<R (*)(Ours...), S (*)(Theirs...)> {
  template <typename A, typename B>
  static constexpr bool Passed() {
    return sizeof(A) == sizeof(B) &&
           std::is_pointer_v<A> == std::is_pointer_v<B>;
  }
  static constexpr bool value =
      Passed<R, S>() && (Passed<Ours, Theirs>() && ...);
};
#define ALIKE(NAME)                                \
  static_assert(Alike<decltype(lt::Library::NAME), \
                      std::add_pointer_t<decltype(cublasLt##NAME)> >::value)

ALIKE(Create);
ALIKE(GetStatusName);
ALIKE(GetVersion);
ALIKE(MatmulDescCreate);
ALIKE(MatmulDescDestroy);
ALIKE(MatmulDescSetAttribute);
ALIKE(MatrixLayoutCreate);
ALIKE(MatrixLayoutDestroy);
ALIKE(MatrixLayoutSetAttribute);
ALIKE(MatmulPreferenceCreate);
ALIKE(MatmulPreferenceDestroy);
ALIKE(MatmulPreferenceSetAttribute);
ALIKE(MatmulAlgoGetHeuristic);
ALIKE(MatmulAlgoCheck);
ALIKE(Matmul);
