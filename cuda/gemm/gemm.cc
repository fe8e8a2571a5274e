// SPDX-License-Identifier: Apache-2.0
//
// Launches: cuBLASLt's descriptors and answers, made once and kept per problem,
// device and alignment.
#include "cuda/gemm/gemm.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <optional>

#include "core/arithmetic.h"
#include "cuda/gemm/launch_key.h"
#include "cuda/gemm/tuning.h"
#include "cuda/gemm/types.h"

namespace jax_layout {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

void* Offset(const void* from, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(from)) + bytes;
}

Status CudaStatus(cudaError_t error) {
  if (error == cudaSuccess) return Status::Ok();
  return Status::Error(std::string("gemm: ") + cudaGetErrorString(error) + ".");
}

// What cublasLtMatmul is called with, but for pointers. a and b are ours: the
// library's first operand is b.
struct Launch {
  LaunchKey key;
  const lt::Library* library = nullptr;
  lt::Handle handle = nullptr;
  lt::MatmulDesc operation = nullptr;
  lt::Layout a = nullptr, b = nullptr, y = nullptr;
  lt::Layout c = nullptr;  // of an 8-bit result, which has no addend; else y
  lt::Algorithm algorithm = {};
  bool provisional = false;  // the first of several, which were not timed
  bool trial = false;        // asked for, but not to be run
  std::mutex pointers;       // held while those in `operation` count

  Launch() = default;
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    if (c == y) c = nullptr;
    for (lt::Layout layout : {a, b, c, y}) {
      if (layout != nullptr) library->MatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) library->MatmulDescDestroy(operation);
  }
};

// Keeps the first call that fails.
class Calls {
 public:
  void operator()(const char* name, lt::Result result) {
    if (result_ != lt::kSuccess) return;
    name_ = name;
    result_ = result;
  }
  bool ok() const { return result_ == lt::kSuccess; }
  Status Finish(const lt::Library& library, const GemmKernel& kernel) const {
    if (ok()) return Status::Ok();
    return Status::Error(std::string("gemm: ") + name_ + " returned " +
                         library.GetStatusName(result_) + " for " +
                         kernel.text + ".");
  }

 private:
  const char* name_ = "";
  lt::Result result_ = lt::kSuccess;
};

// One per device, for the life of the process: making one takes milliseconds,
// and at exit the driver may be gone before it could be destroyed.
lt::Result FindHandle(const lt::Library& library, int device,
                      lt::Handle* handle) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, lt::Handle>;
  std::lock_guard lock(mutex);
  auto [found, is_new] = handles.try_emplace(device, nullptr);
  if (is_new) {
    const lt::Result result = library.Create(&found->second);
    if (result != lt::kSuccess) {
      handles.erase(found);
      return result;
    }
  }
  *handle = found->second;
  return lt::kSuccess;
}

// Lets this thread do what a captured stream otherwise forbids, such as the
// allocations of a library that is used for the first time.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void SetPointers(const lt::Library& library, const void* vector,
                 const void* aux, const GemmBuffers& scales,
                 lt::MatmulDesc operation, Calls* calls) {
  const auto set = [&](lt::MatmulDescAttribute attribute, const void* pointer) {
    (*calls)("cublasLtMatmulDescSetAttribute",
             library.MatmulDescSetAttribute(operation, attribute, &pointer,
                                            sizeof(pointer)));
  };
  if (vector != nullptr) set(lt::kBiasPointer, vector);
  if (aux != nullptr) set(lt::kAuxPointer, aux);
  // The library's first operand is b.
  if (scales.scale_a != nullptr) set(lt::kScaleB, scales.scale_a);
  if (scales.scale_b != nullptr) set(lt::kScaleA, scales.scale_b);
  if (scales.scale_y != nullptr) set(lt::kScaleD, scales.scale_y);
}

Status Enqueue(const GemmKernel& kernel, const GemmBuffers& buffers,
               Launch* launch, cudaStream_t stream) {
  const lt::Library& library = *launch->library;
  Calls calls;
  // The epilogue's buffers are part of the descriptor. A thread that finds it
  // in use waits for a launch on the same device, as it would in the driver.
  std::unique_lock lock(launch->pointers, std::defer_lock);
  if (Vector(buffers) != nullptr || buffers.aux != nullptr ||
      buffers.scale_a != nullptr) {
    lock.lock();
    SetPointers(library, Vector(buffers), buffers.aux, buffers,
                launch->operation, &calls);
  }
  calls("cublasLtMatmul",
        library.Matmul(launch->handle, launch->operation, kernel.alpha.data(),
                       buffers.b, launch->b, buffers.a, launch->a,
                       kernel.beta.data(),
                       launch->c == launch->y ? buffers.y : nullptr, launch->c,
                       buffers.y, launch->y, &launch->algorithm,
                       buffers.workspace, launch->key.workspace_bytes, stream));
  return calls.Finish(library, kernel);
}

// What a choice holds for: the problem, all of the key but the device's number,
// the device and the library.
Status ChoiceName(const GemmKernel& kernel, const Launch& launch,
                  std::string* name) {
  const GemmPlan& plan = kernel.problem.plan;
  const LaunchKey& key = launch.key;
  cudaDeviceProp device;
  Status status = CudaStatus(cudaGetDeviceProperties(&device, key.device));
  *name = std::string(device.name) + ", cuBLASLt " +
          std::to_string(launch.library->GetVersion()) + ": " + kernel.text;
  const auto add = [&](const char* what,
                       std::initializer_list<int64_t> values) {
    *name += what;
    for (int64_t value : values) *name += " " + std::to_string(value);
  };
  add("; compute", {kernel.compute});
  add("; ld", {plan.a.ld, plan.b.ld, plan.y.ld});
  add("; batch", {key.batch});
  if (key.batch > 1) {
    const GemmLoop& batch = kernel.batch;
    add(" by", {batch.a_stride, batch.b_stride, batch.y_stride});
  }
  add("; aligned to", {key.a, key.b, key.y, key.vector, key.aux});
  add("; workspace", {key.workspace_bytes});
  return status;
}

// Memory on the device and two events, for as long as candidates are timed.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (void* memory : memory_) cudaFree(memory);
    for (cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }

  Status Allocate(int64_t bytes, void** to) {
    Status status = CudaStatus(cudaMalloc(to, bytes));
    if (status.ok()) memory_.push_back(*to);
    return status;
  }

  // The milliseconds that what `enqueue` does takes on a stream.
  template <typename Enqueue>
  Status Time(cudaStream_t stream, const Enqueue& enqueue, float* elapsed) {
    cudaError_t error = cudaSuccess;
    for (cudaEvent_t& event : events_) {
      if (!error && event == nullptr) error = cudaEventCreate(&event);
    }
    if (!error) error = cudaEventRecord(events_[0], stream);
    if (error) return CudaStatus(error);
    Status status = enqueue();
    if (!status.ok()) return status;
    error = cudaEventRecord(events_[1], stream);
    if (!error) error = cudaEventSynchronize(events_[1]);
    if (!error) {
      error = cudaEventElapsedTime(elapsed, events_[0], events_[1]);
    }
    return CudaStatus(error);
  }

 private:
  std::vector<void*> memory_;
  cudaEvent_t events_[2] = {nullptr, nullptr};
};

// The fastest of `count` algorithms, in launch->algorithm. They read this
// call's operands, on its stream, and write to scratch. One that fails is left
// out.
Status TimeAlgorithms(const GemmKernel& kernel, GemmBuffers buffers,
                      const lt::HeuristicResult* results, int count,
                      cudaStream_t stream, Launch* launch) {
  constexpr int kRounds = 5;  // the first warms up
  const GemmProblem& problem = kernel.problem;
  const GemmPlan& plan = problem.plan;
  const int64_t bytes = Info(problem.result).bytes;
  const int64_t size = ((launch->key.batch - 1) * kernel.batch.y_stride +
                        (plan.m - 1) * plan.y.ld + plan.n) *
                       bytes;
  Scratch scratch;
  Status status = scratch.Allocate(size, &buffers.y);
  if (status.ok() && problem.aux) status = scratch.Allocate(size, &buffers.aux);
  if (status.ok() && problem.sums) {
    status = scratch.Allocate(plan.m * bytes, &buffers.sums);
  }
  std::vector<float> least(count, std::numeric_limits<float>::infinity());
  for (int round = 0; status.ok() && round < kRounds; ++round) {
    for (int i = 0; status.ok() && i < count; ++i) {
      if (results[i].state != lt::kSuccess) continue;
      launch->algorithm = results[i].algorithm;
      Status launched;
      float elapsed = 0;
      status = scratch.Time(
          stream,
          [&] {
            launched = Enqueue(kernel, buffers, launch, stream);
            return Status::Ok();
          },
          &elapsed);
      if (launched.ok() && round > 0) least[i] = std::min(least[i], elapsed);
    }
  }
  if (!status.ok()) return status;
  const auto best = std::min_element(least.begin(), least.end());
  launch->algorithm = results[best - least.begin()].algorithm;
  return status;
}

bool IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

// The choice that is known, the fastest, or the heuristic's first.
Status ChooseAlgorithm(const GemmKernel& kernel, const GemmBuffers& buffers,
                       lt::Preference preference, cudaStream_t stream,
                       Launch* launch) {
  const lt::Library& library = *launch->library;
  const bool tuned = GemmsTuned();
  std::string name;
  Status status;
  if (tuned) status = ChoiceName(kernel, *launch, &name);
  if (!status.ok()) return status;
  lt::HeuristicResult checked = {};
  if (tuned && FindGemmChoice(name, &launch->algorithm) &&
      library.MatmulAlgoCheck(launch->handle, launch->operation, launch->b,
                              launch->a, launch->c, launch->y,
                              &launch->algorithm, &checked) == lt::kSuccess &&
      checked.workspace_bytes <=
          static_cast<size_t>(launch->key.workspace_bytes)) {
    return Status::Ok();
  }
  int candidates = GemmCandidates();
  // What is captured does not run.
  if (candidates > 1 && (launch->trial || IsCaptured(stream))) {
    candidates = 1;
    launch->provisional = true;
  }
  std::vector<lt::HeuristicResult> results(candidates);
  int returned = 0;
  Calls calls;
  calls("cublasLtMatmulAlgoGetHeuristic",
        library.MatmulAlgoGetHeuristic(
            launch->handle, launch->operation, launch->b, launch->a, launch->c,
            launch->y, preference, candidates, results.data(), &returned));
  if (calls.ok() && returned == 0) {
    return Status::Error("gemm: cuBLASLt has no algorithm for " + kernel.text +
                         ".");
  }
  calls("cublasLtMatmulAlgoGetHeuristic", results[0].state);
  if (!calls.ok()) return calls.Finish(library, kernel);
  launch->algorithm = results[0].algorithm;
  if (candidates == 1) return status;
  // A product that cannot be timed, or its choice not be kept, still runs.
  if (TimeAlgorithms(kernel, buffers, results.data(), returned, stream, launch)
          .ok()) {
    (void)KeepGemmChoice(name, launch->algorithm);
  } else {
    (void)cudaGetLastError();
    launch->algorithm = results[0].algorithm;
  }
  return status;
}

// Fills in all but the key.
Status MakeLaunch(const GemmKernel& kernel, const GemmBuffers& buffers,
                  cudaStream_t stream, Launch* launch) {
  const GemmProblem& problem = kernel.problem;
  const GemmPlan& plan = problem.plan;
  const LaunchKey& key = launch->key;
  Status status = lt::Load(&launch->library);
  if (!status.ok()) return status;
  const lt::Library& library = *launch->library;

  Calls calls;
  calls("cublasLtCreate", FindHandle(library, key.device, &launch->handle));
  calls("cublasLtMatmulDescCreate",
        calls.ok() ? library.MatmulDescCreate(&launch->operation,
                                              kernel.compute, kernel.scale)
                   : lt::kSuccess);
  const auto describe = [&](lt::MatmulDescAttribute attribute, auto value) {
    if (!calls.ok()) return;
    calls("cublasLtMatmulDescSetAttribute",
          library.MatmulDescSetAttribute(launch->operation, attribute, &value,
                                         sizeof(value)));
  };
  const auto lay_out = [&](lt::Layout* layout, DType type, int64_t rows,
                           int64_t cols, int64_t ld, int64_t stride) {
    if (!calls.ok()) return;
    // The distance of lone columns is anything, of no length or of another
    // axis; the library wants them not to overlap.
    if (cols <= 1) ld = std::max<int64_t>(1, rows);
    calls("cublasLtMatrixLayoutCreate",
          library.MatrixLayoutCreate(layout, Info(type).type, rows, cols, ld));
    if (!calls.ok() || key.batch == 1) return;
    const int32_t batch = static_cast<int32_t>(key.batch);
    calls("cublasLtMatrixLayoutSetAttribute",
          library.MatrixLayoutSetAttribute(*layout, lt::kBatchCount, &batch,
                                           sizeof(batch)));
    calls("cublasLtMatrixLayoutSetAttribute",
          library.MatrixLayoutSetAttribute(*layout, lt::kBatchStride, &stride,
                                           sizeof(stride)));
  };

  // The library's matrices are the transposes of ours.
  describe(lt::kTransA, plan.b.transposed ? lt::kTranspose : lt::kNone);
  describe(lt::kTransB, plan.a.transposed ? lt::kTranspose : lt::kNone);
  describe(lt::kEpilogue, kernel.epilogue);
  // As XLA does: sums of 8-bit floats in what the tensor cores have, and not
  // moved to f32 every few terms.
  if (IsFp8(problem.operands) && problem.tf32) {
    describe(lt::kFastAccumulation, int8_t{1});
  }
  if (buffers.aux != nullptr) {
    const int64_t ld = plan.m == 1 ? RoundUp(plan.n, 8) : plan.y.ld;
    describe(lt::kAuxLd, ld);
    if (key.batch > 1) describe(lt::kAuxBatchStride, kernel.batch.y_stride);
  }
  // The heuristic takes from them what alignment it may count on.
  if (calls.ok()) {
    SetPointers(library, Example(Vector(buffers), key.vector),
                Example(buffers.aux, key.aux), buffers, launch->operation,
                &calls);
  }
  lay_out(&launch->b, problem.b_type.value_or(problem.operands),
          plan.b.transposed ? plan.k : plan.n,
          plan.b.transposed ? plan.n : plan.k, plan.b.ld,
          kernel.batch.b_stride);
  lay_out(&launch->a, problem.operands, plan.a.transposed ? plan.m : plan.k,
          plan.a.transposed ? plan.k : plan.m, plan.a.ld,
          kernel.batch.a_stride);
  lay_out(&launch->y, problem.result, plan.n, plan.m, plan.y.ld,
          kernel.batch.y_stride);

  launch->c = launch->y;
  if (IsFp8(problem.result)) {
    launch->c = nullptr;
    lay_out(&launch->c, DType::kBF16, plan.n, plan.m, plan.y.ld,
            kernel.batch.y_stride);
  }

  lt::Preference preference = nullptr;
  if (calls.ok()) {
    calls("cublasLtMatmulPreferenceCreate",
          library.MatmulPreferenceCreate(&preference));
  }
  const auto prefer = [&](lt::PreferenceAttribute attribute, auto value) {
    if (!calls.ok()) return;
    calls("cublasLtMatmulPreferenceSetAttribute",
          library.MatmulPreferenceSetAttribute(preference, attribute, &value,
                                               sizeof(value)));
  };
  prefer(lt::kMaxWorkspaceBytes, static_cast<uint64_t>(key.workspace_bytes));
  prefer(lt::kReductionSchemeMask, lt::kReduceComputeType);
  prefer(lt::kMinAlignmentA, key.b);
  prefer(lt::kMinAlignmentB, key.a);
  prefer(lt::kMinAlignmentC, key.y);
  prefer(lt::kMinAlignmentD, key.y);
  if (calls.ok()) {
    status = ChooseAlgorithm(kernel, buffers, preference, stream, launch);
  }
  if (preference != nullptr) library.MatmulPreferenceDestroy(preference);
  return calls.ok() ? status : calls.Finish(library, kernel);
}

// Of a problem without a product.
Status Fill(const GemmProblem& problem, const GemmBuffers& buffers,
            cudaStream_t stream) {
  const GemmPlan& plan = problem.plan;
  const int64_t bytes = Info(problem.result).bytes;
  // y is dense as a whole.
  const int64_t size = plan.m * plan.n * plan.Steps() * bytes;
  cudaError_t error = cudaSuccess;
  if (problem.beta == 0.) error = cudaMemsetAsync(buffers.y, 0, size, stream);
  if (!error && problem.aux) {  // of gelu, so that beta is 0
    error = cudaMemsetAsync(buffers.aux, 0, size, stream);
  }
  if (!error && problem.sums) {
    error = cudaMemsetAsync(buffers.sums, 0, plan.m * bytes, stream);
  }
  return CudaStatus(error);
}

}  // namespace

// One process has few keys per problem, so they stand in a list.
class GemmLaunches {
 public:
  // Makes the launch if there is none; then `relaxed` is set.
  Status Find(const GemmKernel& kernel, const GemmBuffers& buffers,
              const LaunchKey& key, cudaStream_t stream, Launch** launch,
              std::optional<RelaxedCapture>* relaxed) {
    std::lock_guard lock(mutex_);
    for (Launch& known : launches_) {
      if (known.key == key && (!known.provisional || IsCaptured(stream))) {
        *launch = &known;
        return Status::Ok();
      }
    }
    relaxed->emplace();
    Launch& made = launches_.emplace_front();
    made.key = key;
    Status status = MakeLaunch(kernel, buffers, stream, &made);
    if (!status.ok()) launches_.pop_front();
    *launch = &made;
    return status;
  }

 private:
  std::mutex mutex_;
  std::list<Launch> launches_;
};

Status TryGemm(const GemmKernel& kernel, int64_t workspace_bytes) {
  const GemmProblem& problem = kernel.problem;
  if (kernel.work == GemmKernel::kFill || problem.plan.m == 0 ||
      problem.plan.n == 0 || problem.plan.Steps() == 0) {
    return Status::Ok();
  }
  // Addresses that nothing reads, aligned as XLA's are.
  void* const there = reinterpret_cast<void*>(uintptr_t{1} << 20);
  GemmBuffers buffers = {};
  buffers.a = buffers.b = buffers.y = there;
  const bool aux = problem.aux || problem.derivative != Activation::kNone;
  if (problem.bias) buffers.bias = there;
  if (problem.sums) buffers.sums = there;
  if (aux) buffers.aux = there;
  buffers.workspace_bytes = workspace_bytes;
  int device = 0;
  Status status = CudaStatus(cudaGetDevice(&device));
  if (!status.ok()) return status;
  Launch launch;
  launch.trial = true;
  launch.key = MakeKey(problem, buffers, device);
  launch.key.batch = kernel.piece;
  return MakeLaunch(kernel, buffers, nullptr, &launch);
}

std::shared_ptr<GemmLaunches> NoGemmLaunches() {
  return std::make_shared<GemmLaunches>();
}

Status Gemm(const GemmKernel& kernel, const GemmBuffers& given,
            cudaStream_t stream) {
  const GemmProblem& problem = kernel.problem;
  const GemmPlan& plan = problem.plan;
  const int64_t bytes = Info(problem.operands).bytes;
  const int64_t y_bytes = Info(problem.result).bytes;
  if (plan.m == 0 || plan.n == 0 || plan.Steps() == 0) return Status::Ok();
  if (kernel.work == GemmKernel::kFill) return Fill(problem, given, stream);

  GemmBuffers buffers = given;
  const auto take_workspace = [&](int64_t size) {
    buffers.workspace = Offset(buffers.workspace, size);
    buffers.workspace_bytes =
        std::max<int64_t>(0, buffers.workspace_bytes - size);
  };
  take_workspace(-reinterpret_cast<intptr_t>(buffers.workspace) &
                 (kWorkspaceAlignment - 1));
  if (kernel.work == GemmKernel::kMultiplyZeros) {
    const int64_t zeros = RoundUp(kZerosK * std::max(plan.m, plan.n) * bytes,
                                  kWorkspaceAlignment);
    if (zeros > buffers.workspace_bytes) {
      return Status::Error("gemm: without a product a workspace of " +
                           std::to_string(zeros + kWorkspaceAlignment) +
                           " bytes is needed, got " +
                           std::to_string(given.workspace_bytes) + " for " +
                           kernel.text + ".");
    }
    Status status =
        CudaStatus(cudaMemsetAsync(buffers.workspace, 0, zeros, stream));
    if (!status.ok()) return status;
    buffers.a = buffers.b = buffers.workspace;
    take_workspace(zeros);
  }

  int device = 0;
  Status status = CudaStatus(cudaGetDevice(&device));
  if (!status.ok()) return status;
  LaunchKey key = MakeKey(problem, buffers, device);

  // Held over the first launch too, which may load the kernel.
  std::optional<RelaxedCapture> relaxed;
  Launch *piece = nullptr, *rest = nullptr;
  const int64_t extent = kernel.batch.extent;
  key.batch = kernel.piece;
  status =
      kernel.launches->Find(kernel, buffers, key, stream, &piece, &relaxed);
  if (status.ok() && extent % kernel.piece != 0) {
    key.batch = extent % kernel.piece;
    status =
        kernel.launches->Find(kernel, buffers, key, stream, &rest, &relaxed);
  }

  const int64_t steps = StepsOf(kernel.walked);
  for (int64_t step = 0; status.ok() && step < steps; ++step) {
    const auto [a, b, y] = OffsetsAt(kernel.walked, step);
    for (int64_t i = 0; status.ok() && i < extent; i += kernel.piece) {
      GemmBuffers at = buffers;
      at.a = Offset(buffers.a, (a + i * kernel.batch.a_stride) * bytes);
      at.b = Offset(buffers.b, (b + i * kernel.batch.b_stride) * bytes);
      const int64_t y_offset = (y + i * kernel.batch.y_stride) * y_bytes;
      at.y = Offset(buffers.y, y_offset);
      if (at.aux != nullptr) at.aux = Offset(buffers.aux, y_offset);
      status =
          Enqueue(kernel, at, extent - i < kernel.piece ? rest : piece, stream);
    }
  }
  return status;
}

}  // namespace jax_layout
