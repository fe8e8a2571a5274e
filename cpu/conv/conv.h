// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_LAYOUT_CPU_CONV_CONV_H_
#define JAX_LAYOUT_CPU_CONV_CONV_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/conv/problem.h"
#include "core/status.h"
#include "cpu/executor.h"

namespace jax_layout {

// So many bytes a call keeps from one to the next. A program that gives them
// has a second result, and XLA writes nothing in place of a first that has one.
constexpr int64_t kOwnWorkspace = 8 << 20;

// A problem with what this backend decides once per problem.
struct ConvKernel {
  ConvProblem problem;
  int64_t workspace = 0;       // bytes; a call with less takes its own
  std::string w_format;        // that it reads as it is; "": any, or none
  std::string implementation;  // for reports: "brgconv:avx512_core"
  std::function<Status(const ConvBuffers&, const Executor&)> run;
};

// The names of all ways to compute a convolution.
std::vector<std::string> ConvMethodNames();

// Those of a problem, the best guess first. Whether oneDNN has a kernel is
// found when it is chosen.
std::vector<std::string> ConvMethods(const ConvProblem& problem);

// By `method` if that can, else by the first that can.
Status ChooseConvKernel(const ConvProblem& problem, std::string_view method,
                        ConvKernel* kernel);

Status Conv(const ConvKernel& kernel, const ConvBuffers& buffers,
            const Executor& executor);

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_CONV_H_
