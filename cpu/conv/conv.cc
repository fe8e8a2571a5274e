// SPDX-License-Identifier: Apache-2.0
#include "cpu/conv/conv.h"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/arithmetic.h"
#include "cpu/conv/depthwise/depthwise.h"
#include "cpu/conv/grouped/grouped.h"
#include "cpu/conv/onednn/onednn.h"
#include "cpu/conv/winograd/winograd.h"
#include "cpu/pages.h"

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
// it was planned for another number of threads, or for another machine.
Status WithWorkspace(
    int64_t bytes, const ConvBuffers& buffers, const Executor& executor,
    const std::function<Status(const ConvBuffers&, const Executor&)>& run) {
  constexpr int64_t kAlign = 4096;
  if (buffers.workspace_bytes >= bytes) return run(buffers, executor);
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(kAlign, CeilDiv(bytes, kAlign) * kAlign), &std::free);
  if (memory == nullptr) return Status::Error("conv: out of memory.");
  ConvBuffers own = buffers;
  own.workspace = memory.get();
  own.workspace_bytes = bytes;
  return run(own, executor);
}

// Kernels of ours, in the order in which they are asked.
struct Ours {
  const char* name;
  bool (*supports)(const ConvProblem&);
  int64_t (*workspace)(const ConvProblem&, int num_threads);
  Status (*run)(const ConvProblem&, const ConvBuffers&, const Executor&);
};
constexpr Ours kOurs[] = {
    {"depthwise", DepthwiseSupports, DepthwiseWorkspace, Depthwise},
    {"grouped", GroupedSupports, GroupedWorkspace, Grouped},
    {"winograd", WinogradSupports, WinogradWorkspace, Winograd}};

bool ChooseOurs(const ConvProblem& problem, ConvKernel* kernel) {
  if (!problem.w_format.empty()) return false;
  for (const Ours& ours : kOurs) {
    if (!ours.supports(problem)) continue;
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
    return true;
  }
  return false;
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

}  // namespace

Status ChooseConvKernel(const ConvProblem& problem, ConvKernel* kernel) {
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
  const int64_t begin = Crop(&cropped);
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
  const Status status = ChooseOurs(cropped, kernel)
                            ? Status::Ok()
                            : ChooseOnednnConv(cropped, kernel);
  if (!status.ok()) {
    return Status::Error("conv: no kernel on this machine for " +
                         Text(problem) + " (" + status.message +
                         "); is the package onednn-cpu-gomp missing?");
  }
  if (cropped.in != problem.in) {
    const bool zero = problem.pass == ConvPass::kInputGrad;
    kernel->run = [problem, begin, zero, run = std::move(kernel->run)](
                      const ConvBuffers& buffers, const Executor& executor) {
      ConvBuffers part = buffers;
      const DType type = zero ? problem.result : problem.type;
      part.x = static_cast<char*>(buffers.x) + begin * ItemSize(type);
      if (zero) Zero(problem, buffers, executor);
      return run(part, executor);
    };
  }
  return status;
}

Status Conv(const ConvKernel& kernel, const ConvBuffers& buffers,
            const Executor& executor) {
  const ConvProblem& problem = kernel.problem;
  TouchPages(ResultOf(problem, buffers),
             ResultSize(problem) * ItemSize(problem.result), executor);
  return WithWorkspace(kernel.workspace, buffers, executor, kernel.run);
}

}  // namespace jax_layout
