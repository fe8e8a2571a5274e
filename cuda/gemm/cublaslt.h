// SPDX-License-Identifier: Apache-2.0
//
// The part of cuBLASLt 13 that the GEMMs use. Declared here and found at run
// time, so that the module builds without NVIDIA's library, half a gigabyte
// with its headers, and loads without it; tests/cuda/cublaslt_header.cc holds
// every value against the real header. Descriptors are only ever made by the
// library, as their sizes change between its versions.
#ifndef JAX_LAYOUT_CUDA_GEMM_CUBLASLT_H_
#define JAX_LAYOUT_CUDA_GEMM_CUBLASLT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace jax_layout::lt {

using Handle = struct HandleData*;
using MatmulDesc = struct MatmulDescData*;
using Layout = struct LayoutData*;
using Preference = struct PreferenceData*;

enum Result : int { kSuccess = 0 };  // cublasStatus_t

enum DataType : int {  // cudaDataType_t
  kR32F = 0,
  kR64F = 1,
  kR16F = 2,
  kR8I = 3,
  kC32F = 4,
  kC64F = 5,
  kR32I = 10,
  kR16BF = 14,
  kR8FE4M3 = 28,
  kR8FE5M2 = 29,
};

enum ComputeType : int {  // cublasComputeType_t
  kCompute32F = 68,
  kCompute64F = 70,
  kCompute32I = 72,
  kCompute32FFastTF32 = 77,
};

enum Operation : int { kNone = 0, kTranspose = 1 };  // cublasOperation_t

enum Epilogue : uint32_t {  // cublasLtEpilogue_t
  kDefault = 1,
  kRelu = 2,
  kBias = 4,
  kReluBias = 6,
  kGelu = 32,
  kGeluBias = 36,
  kGeluAux = 160,
  kGeluAuxBias = 164,
  kDGelu = 192,
  kBGradB = 512,
};

enum MatmulDescAttribute : int {  // cublasLtMatmulDescAttributes_t
  kTransA = 3,                    // int32_t
  kTransB = 4,                    // int32_t
  kEpilogue = 7,                  // uint32_t
  kBiasPointer = 8,               // void*
  kAuxPointer = 11,               // void*
  kAuxLd = 12,                    // int64_t
  kAuxBatchStride = 13,           // int64_t
  kScaleA = 17,                   // float*, and so are the next two
  kScaleB = 18,
  kScaleD = 20,
  kFastAccumulation = 25,  // int8_t
};

enum LayoutAttribute : int {  // cublasLtMatrixLayoutAttribute_t
  kBatchCount = 5,            // int32_t
  kBatchStride = 6,           // int64_t
};

enum PreferenceAttribute : int {  // cublasLtMatmulPreferenceAttributes_t
  kMaxWorkspaceBytes = 1,         // uint64_t
  kReductionSchemeMask = 3,       // uint32_t
  kMinAlignmentA = 5,             // uint32_t, and so are the next three
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

// cublasLtReductionScheme_t: partial sums meet in the workspace, in f32.
inline constexpr uint32_t kReduceComputeType = 2;

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Result state;
  float waves;
  int reserved[4];
};

// The entry points: the member Create is cublasLtCreate, and so on.
struct Library {
  Result (*Create)(Handle*);
  const char* (*GetStatusName)(Result);
  size_t (*GetVersion)();
  Result (*MatmulDescCreate)(MatmulDesc*, ComputeType, DataType scale);
  Result (*MatmulDescDestroy)(MatmulDesc);
  Result (*MatmulDescSetAttribute)(MatmulDesc, MatmulDescAttribute, const void*,
                                   size_t);
  Result (*MatrixLayoutCreate)(Layout*, DataType, uint64_t rows, uint64_t cols,
                               int64_t ld);
  Result (*MatrixLayoutDestroy)(Layout);
  Result (*MatrixLayoutSetAttribute)(Layout, LayoutAttribute, const void*,
                                     size_t);
  Result (*MatmulPreferenceCreate)(Preference*);
  Result (*MatmulPreferenceDestroy)(Preference);
  Result (*MatmulPreferenceSetAttribute)(Preference, PreferenceAttribute,
                                         const void*, size_t);
  Result (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, Layout a, Layout b,
                                   Layout c, Layout d, Preference,
                                   int requested, HeuristicResult*,
                                   int* returned);
  Result (*MatmulAlgoCheck)(Handle, MatmulDesc, Layout a, Layout b, Layout c,
                            Layout d, const Algorithm*, HeuristicResult*);
  Result (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout,
                   const void* b, Layout, const void* beta, const void* c,
                   Layout, void* d, Layout, const Algorithm*, void* workspace,
                   size_t workspace_bytes, cudaStream_t);
};

// Loads the library with the first call, whose `path` counts; a failure is not
// kept. jax's CUDA plugin has the default one loaded already: by its name we
// get the same copy.
Status Load(const Library** library, const char* path = "libcublasLt.so.13");

}  // namespace jax_layout::lt

#endif  // JAX_LAYOUT_CUDA_GEMM_CUBLASLT_H_
