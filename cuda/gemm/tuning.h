// SPDX-License-Identifier: Apache-2.0
//
// Which of cuBLASLt's algorithms problems use, where that is not the first that
// its heuristic names: what was timed, in this process or an earlier one.
#ifndef JAX_LAYOUT_CUDA_GEMM_TUNING_H_
#define JAX_LAYOUT_CUDA_GEMM_TUNING_H_

#include <string>

#include "core/status.h"
#include "cuda/gemm/cublaslt.h"

namespace jax_layout {

// Says for the process that `candidates` of the heuristic are timed for every
// problem whose choice is not known; with 1 none is. Choices are read from the
// file, if there is one, and written to it: a JSON object with a string for
// each problem. Without a path they last as long as the process. Problems that
// have run already keep what they have.
Status TuneGemms(const std::string& path, int candidates);

// Whether any choice may be known or made.
bool GemmsTuned();

int GemmCandidates();

bool FindGemmChoice(const std::string& problem, lt::Algorithm* algorithm);

// Also writes the file, with what other processes wrote to it meanwhile.
Status KeepGemmChoice(const std::string& problem,
                      const lt::Algorithm& algorithm);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_GEMM_TUNING_H_
