// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/conv.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/arithmetic.h"
#include "cpu/conv/depthwise/depthwise.h"
#include "cpu/conv/grouped/grouped.h"
#include "cpu/conv/onednn/onednn.h"
#include "cpu/conv/widened/widened.h"
#include "cpu/conv/winograd/winograd.h"
#include "cpu/pages.h"
#include "cpu/scratch.h"

namespace jax_layout {
namespace {

int64_t Product(const std::array<int64_t, 3>& a) { return a[0] * a[1] * a[2]; }

struct Sizes {  // in elements
  int64_t x, w, y;
};
Sizes SizesOf(const ConvProblem& p) {
  return {p.batch * p.in_channels * Product(p.in),
          p.out_channels * (p.in_channels / p.groups) * Product(p.kernel),
          p.batch * p.out_channels * Product(p.out)};
}

int64_t ResultSize(const ConvProblem& p) {
  const Sizes sizes = SizesOf(p);
  return p.pass == ConvPass::kForward     ? sizes.y
         : p.pass == ConvPass::kInputGrad ? sizes.x
                                          : sizes.w;
}

char* ResultOf(const ConvProblem& p, const ConvBuffers& buffers) {
  return static_cast<char*>(p.pass == ConvPass::kForward     ? buffers.y
                            : p.pass == ConvPass::kInputGrad ? buffers.x
                                                             : buffers.w);
}

void Zero(const ConvProblem& p, const ConvBuffers& buffers,
          const Executor& executor) {
  constexpr int64_t kPiece = 1 << 20;
  char* y = ResultOf(p, buffers);
  const int64_t bytes = ResultSize(p) * ItemSize(p.result);
  executor.ParallelFor(CeilDiv(bytes, kPiece), [&](int64_t i) {
    std::memset(y + i * kPiece, 0, std::min(kPiece, bytes - i * kPiece));
  });
}

// Runs with the workspace, or with memory of its own where that is too small:
// the program was not asked for any, or it was planned for another number of
// threads, or for another machine.
Status WithWorkspace(
    int64_t bytes, const ConvBuffers& buffers, const Executor& executor,
    const std::function<Status(const ConvBuffers&, const Executor&)>& run) {
  constexpr int64_t kAlign = 4096;
  if (buffers.workspace_bytes >= bytes) return run(buffers, executor);
  ConvBuffers own = buffers;
  own.workspace_bytes = bytes;
  if (bytes <= kOwnWorkspace) {
    LentScratch scratch;
    own.workspace = scratch.Reserve(bytes);
    if (own.workspace != nullptr) return run(own, executor);
  }
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(kAlign, RoundUp(bytes, kAlign)), &std::free);
  if (memory == nullptr) return Status::Error("conv: out of memory.");
  own.workspace = memory.get();
  return run(own, executor);
}

constexpr char kOnednn[] = "oneDNN", kWidened[] = "widened";

// Kernels of ours.
struct Ours {
  const char* name;
  bool (*supports)(const ConvProblem&);
  bool (*preferred)(const ConvProblem&);
  int64_t (*workspace)(const ConvProblem&, int num_threads);
  Status (*run)(const ConvProblem&, const ConvBuffers&, const Executor&);
};
constexpr Ours kOurs[] = {
    {"depthwise", DepthwiseSupports, DepthwiseSupports, DepthwiseWorkspace,
     Depthwise},
    {"grouped",
     [](const ConvProblem& p) { return GroupedSupports(p, BestIsa()); },
     GroupedSupports, GroupedWorkspace, Grouped},
    {"winograd",
     [](const ConvProblem& p) { return WinogradSupports(p, BestIsa()); },
     [](const ConvProblem& p) {
       return WinogradSupports(p) &&
              (p.type == DType::kF32 || !OnednnSums16(p.type));
     },
     WinogradWorkspace, Winograd}};

Status ChooseOurs(const Ours& ours, const ConvProblem& problem,
                  ConvKernel* kernel) {
  kernel->implementation = ours.name;
  kernel->workspace = ours.workspace(problem, ProcessorCount());
  kernel->run = [problem, &ours](const ConvBuffers& buffers,
                                 const Executor& executor) {
    return WithWorkspace(ours.workspace(problem, executor.num_threads()),
                         buffers, executor,
                         [&](const ConvBuffers& b, const Executor& e) {
                           return ours.run(problem, b, e);
                         });
  };
  return Status::Ok();
}

// Whether a bias of this type is below zero; NaN is not.
bool Negative(DType type, const char* bits) {
  switch (type) {
    case DType::kF32: {
      float value;
      std::memcpy(&value, bits, sizeof(value));
      return value < 0;
    }
    case DType::kS32: {
      int32_t value;
      std::memcpy(&value, bits, sizeof(value));
      return value < 0;
    }
    default: {
      uint16_t value;
      std::memcpy(&value, bits, sizeof(value));
      return value > 0x8000 &&
             value <= (type == DType::kBF16 ? 0xff80 : 0xfc00);
    }
  }
}

// Nothing is summed: y is what bias and relu make of zero.
Status RunWithoutProduct(const ConvProblem& p, const ConvBuffers& buffers,
                         const Executor& executor) {
  Zero(p, buffers, executor);
  if (!p.bias) return Status::Ok();
  const int64_t item = ItemSize(p.result);
  const auto& strides = p.y.strides;
  executor.ParallelFor(p.batch * p.out[0], [&](int64_t i) {
    const int64_t n = i / p.out[0], d = i % p.out[0];
    for (int64_t c = 0; c < p.out_channels; ++c) {
      const char* bias = static_cast<const char*>(buffers.bias) + c * item;
      if (p.relu && Negative(p.result, bias)) continue;
      const int64_t at = n * strides[0] + c / p.y.block * strides[1] +
                         c % p.y.block + d * strides[2];
      for (int64_t h = 0; h < p.out[1]; ++h) {
        for (int64_t w = 0; w < p.out[2]; ++w) {
          std::memcpy(static_cast<char*>(buffers.y) +
                          (at + h * strides[3] + w * strides[4]) * item,
                      bias, item);
        }
      }
    }
  });
  return Status::Ok();
}

// The same problem on the part of x that negative padding leaves: where it
// begins, in elements.
int64_t Crop(ConvProblem* p) {
  int64_t at = 0;
  for (int i = 0; i < 3; ++i) {
    int64_t& low = p->pad_low[i];
    int64_t& high = p->pad_high[i];
    if (low < 0) at -= low * p->x.strides[2 + i];
    p->in[i] += std::min<int64_t>(low, 0) + std::min<int64_t>(high, 0);
    low = std::max<int64_t>(low, 0);
    high = std::max<int64_t>(high, 0);
  }
  return at;
}

bool Types(const ConvProblem& p) {
  const DType in = p.type, out = p.result;
  if (in == DType::kS8) {
    return p.pass == ConvPass::kForward &&
           (out == DType::kS32 || out == DType::kF32);
  }
  if (in == DType::kF32) return out == in;
  return (in == DType::kBF16 || in == DType::kF16) &&
         (out == in || out == DType::kF32);
}

std::string Text(const ConvProblem& p) {
  auto name = [](DType type) {
    return std::string(kDTypeNames[static_cast<int>(type)]);
  };
  return std::to_string(p.in_channels) + " to " +
         std::to_string(p.out_channels) + " channels in " +
         std::to_string(p.groups) + " groups, " + name(p.type) + " -> " +
         name(p.result);
}

// The same, by kernels that know no negative padding.
Status ChooseCropped(const ConvProblem& problem, const std::string& method,
                     ConvKernel* kernel) {
  ConvProblem cropped = problem;
  const int64_t begin = Crop(&cropped);
  const Ours* const ours =
      std::find_if(std::begin(kOurs), std::end(kOurs),
                   [&](const Ours& ours) { return ours.name == method; });
  const Status status = ours != std::end(kOurs)
                            ? ChooseOurs(*ours, cropped, kernel)
                            : ChooseOnednnConv(cropped, kernel);
  if (!status.ok() || cropped.in == problem.in) return status;
  const bool zero = problem.pass == ConvPass::kInputGrad;
  kernel->run = [problem, begin, zero, run = std::move(kernel->run)](
                    const ConvBuffers& buffers, const Executor& executor) {
    ConvBuffers part = buffers;
    const DType type = zero ? problem.result : problem.type;
    part.x = static_cast<char*>(buffers.x) + begin * ItemSize(type);
    if (zero) Zero(problem, buffers, executor);
    return run(part, executor);
  };
  return status;
}

}  // namespace

std::vector<std::string> ConvMethodNames() {
  std::vector<std::string> names;
  for (const Ours& ours : kOurs) names.push_back(ours.name);
  names.insert(names.end(), {kOnednn, kWidened});
  return names;
}

std::vector<std::string> ConvMethods(const ConvProblem& problem) {
  ConvProblem cropped = problem;
  Crop(&cropped);
  std::vector<std::string> first, others;
  for (const Ours& ours : kOurs) {
    if (!problem.w_format.empty() || !ours.supports(cropped)) continue;
    (ours.preferred(cropped) ? first : others).push_back(ours.name);
  }
  const bool wide = ItemSize(problem.type) != 2;
  if (wide || OnednnSums16(problem.type)) first.push_back(kOnednn);
  if (!wide) first.push_back(kWidened);
  if (!wide && !OnednnSums16(problem.type)) others.push_back(kOnednn);
  first.insert(first.end(), others.begin(), others.end());
  return first;
}

Status ChooseConvKernel(const ConvProblem& problem, std::string_view method,
                        ConvKernel* kernel) {
  *kernel = {};
  kernel->problem = problem;
  if (!Types(problem)) {
    return Status::Error("conv: no kernel for " + Text(problem) + ".");
  }
  if (ResultSize(problem) == 0) {
    kernel->implementation = "nothing to compute";
    kernel->run = [](const ConvBuffers&, const Executor&) {
      return Status::Ok();
    };
    return Status::Ok();
  }
  ConvProblem cropped = problem;
  Crop(&cropped);
  const Sizes sizes = SizesOf(cropped);
  if (std::min({cropped.in[0], cropped.in[1], cropped.in[2], sizes.x, sizes.w,
                sizes.y}) <= 0) {
    kernel->implementation = "nothing to sum";
    kernel->run = [problem](const ConvBuffers& buffers,
                            const Executor& executor) {
      return RunWithoutProduct(problem, buffers, executor);
    };
    return Status::Ok();
  }
  std::vector<std::string> methods = ConvMethods(problem);
  std::stable_partition(
      methods.begin(), methods.end(),
      [&](const std::string& name) { return name == method; });
  Status status;
  for (const std::string& name : methods) {
    if (name == kWidened) {
      ConvKernel wide;
      status = ChooseConvKernel(Widened(problem), "", &wide);
      if (status.ok()) Widen(problem, std::move(wide), kernel);
    } else {
      status = ChooseCropped(problem, name, kernel);
    }
    if (status.ok()) return status;
  }
  return Status::Error("conv: no kernel on this machine for " + Text(problem) +
                       " (" + status.message +
                       "); is the package onednn-cpu-gomp missing?");
}

Status Conv(const ConvKernel& kernel, const ConvBuffers& buffers,
            const Executor& executor) {
  const ConvProblem& problem = kernel.problem;
  TouchPages(ResultOf(problem, buffers),
             ResultSize(problem) * ItemSize(problem.result), executor);
  return WithWorkspace(kernel.workspace, buffers, executor, kernel.run);
}

}  // namespace jax_layout
