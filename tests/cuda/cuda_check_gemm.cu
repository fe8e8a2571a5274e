// SPDX-License-Identifier: Apache-2.0
//
// The CUDA GEMM against loops in double precision, on a real device and without
// Python, captured in a graph at its first call and then called once more:
//
//   nvcc -std=c++20 -O3 -I. -o cuda_check_gemm tests/cuda/cuda_check_gemm.cu
//     cuda/gemm/{gemm,choose,cublaslt,tuning}.cc -ldl
//   cuda_check_gemm [.../libcublasLt.so.13]
//
// What this library refuses and what cuBLASLt has no algorithm for is printed.
// The exit code is the number of wrong cases, 100 at most.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cuda/gemm/gemm.h"
#include "tests/cuda/fake_cublaslt/numbers.h"

namespace {

using jax_layout::Activation;
using jax_layout::DType;
using numbers::Complex;
namespace lt = jax_layout::lt;

constexpr size_t kWorkspace = 32 << 20;
constexpr size_t kGuard = 256;
constexpr int kPoison = 0xCB;

struct Types {
  const char* name;
  DType operands, result;
  lt::DataType operand_type, result_type;
  double epsilon;  // of the result
  bool tf32;
};
const Types kTypes[] = {
    {"f32", DType::kF32, DType::kF32, lt::kR32F, lt::kR32F, 1.2e-7, false},
    {"tf32", DType::kF32, DType::kF32, lt::kR32F, lt::kR32F, 1.2e-7, true},
    {"f64", DType::kF64, DType::kF64, lt::kR64F, lt::kR64F, 2.3e-16, false},
    {"bf16", DType::kBF16, DType::kBF16, lt::kR16BF, lt::kR16BF, 7.9e-3, false},
    {"bf16->f32", DType::kBF16, DType::kF32, lt::kR16BF, lt::kR32F, 1.2e-7,
     false},
    {"f16", DType::kF16, DType::kF16, lt::kR16F, lt::kR16F, 9.8e-4, false},
    {"f16->f32", DType::kF16, DType::kF32, lt::kR16F, lt::kR32F, 1.2e-7, false},
    {"e4m3->bf16", DType::kF8E4M3, DType::kBF16, lt::kR8FE4M3, lt::kR16BF,
     7.9e-3, false},
    {"e4m3->f32", DType::kF8E4M3, DType::kF32, lt::kR8FE4M3, lt::kR32F, 1.2e-7,
     false},
    {"s8->s32", DType::kS8, DType::kS32, lt::kR8I, lt::kR32I, 0, false},
    {"c64", DType::kC64, DType::kC64, lt::kC32F, lt::kC32F, 1.2e-7, false},
    {"c64 tf32", DType::kC64, DType::kC64, lt::kC32F, lt::kC32F, 1.2e-7, true},
    {"c128", DType::kC128, DType::kC128, lt::kC64F, lt::kC64F, 2.3e-16, false},
};

struct Case {
  std::string spec;
  std::vector<int64_t> a_shape, b_shape;
  double alpha = 1, beta = 0;
  bool bias = false, aux = false, sums = false;
  Activation activation = Activation::kNone;
  Activation derivative = Activation::kNone;
  bool misaligned = false;
};

std::string Name(const Case& c, const Types& types) {
  std::string name = std::string(types.name) + " " + c.spec;
  for (const auto* shape : {&c.a_shape, &c.b_shape}) {
    name += " (";
    for (int64_t n : *shape) name += std::to_string(n) + ",";
    name.back() = ')';
  }
  name +=
      " alpha " + std::to_string(c.alpha) + " beta " + std::to_string(c.beta);
  if (c.bias) name += " bias";
  if (c.activation == Activation::kRelu) name += " relu";
  if (c.activation == Activation::kGelu) name += " gelu";
  if (c.aux) name += " aux";
  if (c.derivative == Activation::kGelu) name += " dgelu";
  if (c.sums) name += " sums";
  if (c.misaligned) name += " misaligned";
  return name;
}

// A buffer on the device, with what it is to hold, and guards around it.
class Buffer {
 public:
  Buffer(lt::DataType type, size_t count, bool misaligned)
      : type_(type),
        values_(count),
        bytes_(count * numbers::Bytes(type)),
        // Complex numbers in halves.
        before_(kGuard +
                (misaligned ? std::min<size_t>(8, numbers::Bytes(type)) : 0)),
        host_(before_ + bytes_ + kGuard, kPoison) {
    ok_ = cudaMalloc(&device_, host_.size()) == cudaSuccess;
  }
  ~Buffer() { cudaFree(device_); }
  Buffer(const Buffer&) = delete;

  std::vector<Complex>& values() { return values_; }
  void* data() { return static_cast<char*>(device_) + before_; }

  // Small multiples of 1/2, of which every sum here is exact in f32.
  void Draw(uint32_t seed) {
    for (Complex& value : values_) {
      const auto next = [&] {
        seed = seed * 1664525u + 1013904223u;
        const int integer = static_cast<int>(seed >> 24) % 9 - 4;
        return type_ == lt::kR8I || type_ == lt::kR32I ? integer
                                                       : integer / 2.0;
      };
      const double real = next();
      const bool complex = type_ == lt::kC32F || type_ == lt::kC64F;
      value = {real, complex ? next() : 0.0};
    }
  }
  bool Upload() {
    for (size_t i = 0; i < values_.size(); ++i) {
      numbers::Store(type_, &host_[before_], i, values_[i]);
    }
    return ok_ && cudaMemcpy(device_, host_.data(), host_.size(),
                             cudaMemcpyHostToDevice) == cudaSuccess;
  }
  // Compares with the values, of which the largest sets the scale.
  std::string Compare(const char* what, double tolerance) {
    std::vector<unsigned char> got(host_.size());
    if (cudaMemcpy(got.data(), device_, got.size(), cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      return "cannot read the device";
    }
    for (size_t i = 0; i < before_; ++i) {
      if (got[i] != kPoison) return std::string(what) + ": written before";
    }
    for (size_t i = before_ + bytes_; i < got.size(); ++i) {
      if (got[i] != kPoison) return std::string(what) + ": written behind";
    }
    double scale = 1;
    for (const Complex& value : values_) {
      scale = std::max(scale, std::abs(value));
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      const Complex x = numbers::Load(type_, &got[before_], i);
      if (!(std::abs(x - values_[i]) <=
            tolerance * (std::abs(values_[i]) + 0.01 * scale))) {
        return std::string(what) + "[" + std::to_string(i) + "] is " +
               std::to_string(x.real()) + ", not " +
               std::to_string(values_[i].real());
      }
    }
    return "";
  }

 private:
  lt::DataType type_;
  std::vector<Complex> values_;
  size_t bytes_, before_;
  std::vector<unsigned char> host_;
  void* device_ = nullptr;
  bool ok_;
};

size_t Count(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

// By the letters of the contraction, knowing nothing of plans.
std::vector<Complex> Einsum(const Case& c, const std::vector<int64_t>& y_shape,
                            const std::vector<Complex>& a,
                            const std::vector<Complex>& b) {
  const std::string &spec = c.spec, y_labels = spec.substr(spec.find('>') + 1);
  const std::string a_labels = spec.substr(0, spec.find(','));
  const std::string b_labels =
      spec.substr(a_labels.size() + 1, spec.find('-') - a_labels.size() - 1);
  int64_t k = 1, a_step = 0, b_step = 0;
  std::map<char, std::array<int64_t, 2>> strides;
  for (int operand = 0; operand < 2; ++operand) {
    const std::string& labels = operand ? b_labels : a_labels;
    const auto& shape = operand ? c.b_shape : c.a_shape;
    int64_t stride = 1;
    for (size_t i = labels.size(); i-- > 0; stride *= shape[i]) {
      if (y_labels.find(labels[i]) == std::string::npos) {
        k = shape[i];
        (operand ? b_step : a_step) = stride;
      } else {
        strides[labels[i]][operand] = stride;
      }
    }
  }
  std::vector<Complex> y(Count(y_shape));
  for (size_t i = 0; i < y.size(); ++i) {
    int64_t at_a = 0, at_b = 0, left = i;
    for (size_t d = y_shape.size(); d-- > 0; left /= y_shape[d]) {
      at_a += left % y_shape[d] * strides[y_labels[d]][0];
      at_b += left % y_shape[d] * strides[y_labels[d]][1];
    }
    for (int64_t l = 0; l < k; ++l) {
      y[i] += a[at_a + l * a_step] * b[at_b + l * b_step];
    }
  }
  return y;
}

// Returns what went wrong. `*missing` is set where there is no such GEMM.
std::string Check(const Case& c, const Types& types, cudaStream_t stream,
                  void* workspace, bool* missing) {
  jax_layout::GemmProblem problem;
  bool in_place = false;
  jax_layout::Status status = jax_layout::MakeGemmPlan(
      c.spec, c.a_shape, c.b_shape, &problem.plan, &in_place);
  if (!status.ok() || !in_place) return "has no plan";
  problem.operands = types.operands;
  problem.result = types.result;
  problem.alpha = c.alpha;
  problem.beta = c.beta;
  problem.tf32 = types.tf32;
  problem.bias = c.bias;
  problem.activation = c.activation;
  problem.aux = c.aux;
  problem.derivative = c.derivative;
  problem.sums = c.sums;
  jax_layout::GemmKernel kernel;
  status = jax_layout::ChooseGemmKernel(problem, &kernel);
  *missing = !status.ok();
  if (*missing) return status.message;

  std::map<char, int64_t> extents;
  const size_t comma = c.spec.find(',');
  for (size_t i = 0; i < c.a_shape.size(); ++i) {
    extents[c.spec[i]] = c.a_shape[i];
  }
  for (size_t i = 0; i < c.b_shape.size(); ++i) {
    extents[c.spec[comma + 1 + i]] = c.b_shape[i];
  }
  std::vector<int64_t> y_shape;
  for (char label : c.spec.substr(c.spec.find('>') + 1)) {
    y_shape.push_back(extents[label]);
  }

  std::vector<Complex> product;  // the draws are the same each time
  for (const bool captured : {true, false}) {
    const size_t y_count = Count(y_shape);
    Buffer a(types.operand_type, Count(c.a_shape), c.misaligned);
    Buffer b(types.operand_type, Count(c.b_shape), c.misaligned);
    Buffer y(types.result_type, y_count, c.misaligned);
    Buffer aux(types.result_type, y_count, c.misaligned);
    Buffer bias(types.result_type, problem.plan.n, c.misaligned);
    Buffer sums(types.result_type, problem.plan.m, c.misaligned);
    uint32_t seed = 1;
    for (Buffer* buffer : {&a, &b, &y, &aux, &bias, &sums}) {
      buffer->Draw(++seed);
      if (!buffer->Upload()) return "cannot write to the device";
    }

    jax_layout::GemmBuffers buffers;
    buffers.a = a.data();
    buffers.b = b.data();
    if (problem.plan.swapped) std::swap(buffers.a, buffers.b);
    buffers.y = y.data();
    if (c.bias) buffers.bias = bias.data();
    if (c.aux || c.derivative != Activation::kNone) buffers.aux = aux.data();
    if (c.sums) buffers.sums = sums.data();
    buffers.workspace = workspace;
    buffers.workspace_bytes = kWorkspace;
    cudaError_t error = cudaSuccess;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    if (captured) {
      error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    }
    status = jax_layout::Gemm(kernel, buffers, stream);
    if (captured) {
      if (!error) error = cudaStreamEndCapture(stream, &graph);
      if (!error && status.ok()) {
        error = cudaGraphInstantiate(&program, graph, 0);
        if (!error) error = cudaGraphLaunch(program, stream);
      }
    }
    const cudaError_t ran = cudaStreamSynchronize(stream);
    if (program != nullptr) cudaGraphExecDestroy(program);
    if (graph != nullptr) cudaGraphDestroy(graph);
    const std::string how = captured ? "captured: " : "called: ";
    if (!status.ok()) {
      *missing = status.message.find("NOT_SUPPORTED") != std::string::npos ||
                 status.message.find("no algorithm") != std::string::npos;
      return status.message;
    }
    if (error || ran) return how + cudaGetErrorString(error ? error : ran);

    if (captured) product = Einsum(c, y_shape, a.values(), b.values());
    std::vector<Complex> z = product;
    for (size_t i = 0; i < z.size(); ++i) {
      z[i] *= c.alpha;
      if (c.beta != 0) z[i] += c.beta * y.values()[i];
      if (c.bias) z[i] += bias.values()[i % problem.plan.n];
    }
    double tolerance = std::max(types.epsilon, 1e-15);
    if (c.aux) aux.values() = z;
    for (size_t i = 0; i < z.size(); ++i) {
      if (c.activation == Activation::kRelu && z[i].real() < 0) z[i] = 0;
      if (c.activation == Activation::kGelu) {
        z[i] = numbers::Gelu(z[i].real());
      }
      if (c.derivative == Activation::kGelu) {
        z[i] *= numbers::GeluDerivative(aux.values()[i].real());
      }
    }
    // Of the library's tanh, which may be approximate.
    const double curve =
        c.activation == Activation::kGelu || c.derivative != Activation::kNone
            ? 2e-3
            : 0;
    y.values() = z;
    std::string wrong = y.Compare("y", tolerance + curve);
    if (wrong.empty() && c.aux) wrong = aux.Compare("aux", tolerance);
    if (wrong.empty() && c.sums) {
      // Transposed or not, m is the other of a's two axes.
      const bool first = c.spec[0] == 'm';
      const int64_t m = problem.plan.m, k = problem.plan.k;
      for (int64_t i = 0; i < m; ++i) {
        Complex sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          sum += a.values()[first ? i * k + l : l * m + i];
        }
        sums.values()[i] = sum;
      }
      wrong = sums.Compare("sums", tolerance);
    }
    if (!wrong.empty()) return how + wrong;
  }
  return "";
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::vector<Case> products = {
      {"mk,nk->mn", {48, 32}, {64, 32}},
      {"mk,kn->mn", {48, 32}, {32, 64}},
      {"km,kn->mn", {32, 48}, {32, 64}},
      {"mk,kn->nm", {48, 32}, {32, 64}},
      {"bmk,bkn->bmn", {5, 24, 32}, {5, 32, 16}},
      {"bmk,bnk->bmn", {5, 24, 32}, {5, 16, 32}},
      {"bshd,bthd->bhst", {2, 24, 3, 32}, {2, 16, 3, 32}},
      {"bhst,bthd->bshd", {2, 3, 24, 16}, {2, 16, 3, 32}},
      {"bsm,mhd->bhsd", {2, 24, 32}, {32, 3, 16}},
      {"mk,nk->mn", {37, 41}, {43, 41}},
      {"km,kn->mn", {41, 37}, {41, 43}},
      {"mk,k->m", {37, 41}, {41}},
      {"mk,kn->mn", {1, 32}, {32, 64}},
      {"m,n->mn", {37}, {43}},
      {"mk,nk->mn", {48, 0}, {32, 0}},
      {"bmk,bkn->bmn", {70001, 1, 2}, {70001, 2, 1}},
  };
  for (const Case& product : products) {
    for (const auto& [alpha, beta] : {std::pair{1., 0.}, {2., -1.}, {0., 3.}}) {
      for (const bool misaligned : {false, true}) {
        Case c = product;
        c.alpha = alpha;
        c.beta = beta;
        c.misaligned = misaligned;
        cases.push_back(c);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (const double beta : {0., 1.}) {
      for (const double alpha : {1., 0.5}) {
        Case c = products[i];
        if (i == 3) c = {"bmk,bkn->bmn", {5, 24, 32}, {5, 32, 16}};
        c.alpha = alpha;
        c.beta = beta;
        c.derivative = Activation::kGelu;
        cases.push_back(c);
        c.derivative = Activation::kNone;
        if (i != 3) {
          c.sums = true;
          cases.push_back(c);
          c.sums = false;
        }
        for (const bool bias : {false, true}) {
          if (i == 3) c = {"bmk,kn->bmn", {5, 24, 32}, {32, 16}, alpha, beta};
          c.bias = bias;
          for (const Activation activation :
               {Activation::kNone, Activation::kRelu, Activation::kGelu}) {
            c.activation = activation;
            cases.push_back(c);
          }
          c.aux = true;
          cases.push_back(c);
          c.aux = false;
          c.activation = Activation::kNone;
        }
      }
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaStreamCreate(&stream) != cudaSuccess ||
      cudaMalloc(&workspace, kWorkspace) != cudaSuccess) {
    std::fprintf(stderr, "cuda_check_gemm: no CUDA device\n");
    return 100;
  }
  if (argc > 1) {
    const lt::Library* library;
    const jax_layout::Status status = lt::Load(&library, argv[1]);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message.c_str());
      return 100;
    }
  }
  int cases = 0, missing = 0, failed = 0;
  for (const Types& types : kTypes) {
    for (const Case& c : Cases()) {
      ++cases;
      bool is_missing = false;
      const std::string wrong = Check(c, types, stream, workspace, &is_missing);
      if (wrong.empty()) continue;
      ++(is_missing ? missing : failed);
      std::printf("%s %s: %s\n", is_missing ? "none" : "WRONG",
                  Name(c, types).c_str(), wrong.c_str());
    }
  }
  std::printf("cuda_check_gemm: %d of %d cases wrong, %d not to be had\n",
              failed, cases, missing);
  return std::min(failed, 100);
}
