// SPDX-License-Identifier: Apache-2.0
//
// cublasLtMatmul in plain loops over host memory, and what NVIDIA documents
// that the real one refuses. It is as unhelpful as allowed: an algorithm needs
// all of the alignment and half of the workspace that the heuristic was told
// of, the workspace is overwritten, alpha = 0 multiplies all the same.
#include <algorithm>
#include <tuple>

#include "numbers.h"

namespace lt = jax_layout::lt;
using numbers::Complex;

namespace jax_layout::lt {

struct HandleData {};

struct MatmulDescData {
  ComputeType compute;
  DataType scale;
  Operation trans_a = kNone, trans_b = kNone;
  Epilogue epilogue = kDefault;
  void *vector = nullptr, *aux = nullptr;
  int64_t aux_ld = 0, aux_stride = 0;
  const float *scale_a = nullptr, *scale_b = nullptr, *scale_d = nullptr;
  int8_t fast = 0;
};

struct LayoutData {
  DataType type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
  bool operator==(const LayoutData&) const = default;
};

struct PreferenceData {
  uint64_t workspace = 0;
  uint32_t mask = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

}  // namespace jax_layout::lt

// For the tests to read, and to make a call fail.
extern "C" {
int fake_heuristics = 0, fake_matmuls = 0, fake_handles = 0, fake_live = 0;
int fake_mask = 0, fake_compute = 0, fake_epilogue = 0, fake_batch = 0;
int fake_fast = 0;
int fake_fail = 0, fake_without_algorithm = 0;
int fake_clock = 0, fake_version = 130100, fake_candidate = 0;
}

namespace {

constexpr lt::Result kInvalidValue{7}, kNotSupported{15};

// Milliseconds of each algorithm that the heuristic knows, none for one that
// fails when it runs. The first is not the fastest.
constexpr int kCosts[] = {5, 0, 4, 2, 3};

bool Has(lt::Epilogue epilogue, uint32_t bit) { return epilogue & bit; }
constexpr uint32_t kBiasBit = 4, kAuxBit = 128;
bool HasVector(lt::Epilogue epilogue) {
  return epilogue == lt::kBGradB || Has(epilogue, kBiasBit);
}

struct Types {
  lt::ComputeType compute;
  lt::DataType scale, operands, result;
  bool epilogues;
  auto operator<=>(const Types&) const = default;
};
constexpr Types kTypes[] = {
    {lt::kCompute32I, lt::kR32I, lt::kR8I, lt::kR32I, false},
    {lt::kCompute32F, lt::kR32F, lt::kR16BF, lt::kR16BF, true},
    {lt::kCompute32F, lt::kR32F, lt::kR16BF, lt::kR32F, true},
    {lt::kCompute32F, lt::kR32F, lt::kR16F, lt::kR16F, true},
    {lt::kCompute32F, lt::kR32F, lt::kR16F, lt::kR32F, true},
    {lt::kCompute32F, lt::kR32F, lt::kR32F, lt::kR32F, true},
    {lt::kCompute32F, lt::kR32F, lt::kR8FE4M3, lt::kR16BF, true},
    {lt::kCompute32F, lt::kC32F, lt::kC32F, lt::kC32F, false},
    {lt::kCompute32FFastTF32, lt::kR32F, lt::kR32F, lt::kR32F, true},
    {lt::kCompute32FFastTF32, lt::kC32F, lt::kC32F, lt::kC32F, false},
    {lt::kCompute64F, lt::kR64F, lt::kR64F, lt::kR64F, true},
    {lt::kCompute64F, lt::kC64F, lt::kC64F, lt::kC64F, false},
};

bool IsFp8(lt::DataType type) {
  return type == lt::kR8FE4M3 || type == lt::kR8FE5M2;
}

// As the manual's table for 8-bit floats has it. An addend is never one.
bool HasFp8Types(lt::DataType a, lt::DataType b, lt::DataType c,
                 lt::DataType d) {
  if (a == lt::kR8FE5M2 && b == a) return false;
  if (d == lt::kR8FE5M2 && a == b) return false;
  if (IsFp8(d)) return c == lt::kR16BF || c == lt::kR16F;
  return c == d && (d == lt::kR16BF || d == lt::kR16F || d == lt::kR32F);
}

bool Multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(),
                     [of](int64_t value) { return value % of == 0; });
}

lt::Result Check(lt::MatmulDesc op, lt::Layout a, lt::Layout b, lt::Layout c,
                 lt::Layout d) {
  if (!op || !a || !b || !c || !d) return kInvalidValue;
  for (lt::Layout m : {a, b, c, d}) {
    if (m->rows == 0 || m->cols == 0 || m->ld < int64_t(m->rows) ||
        m->batch < 1 || m->batch != d->batch) {
      return kInvalidValue;
    }
    if (m->batch > 65535 || (m->rows | m->cols) >> 31) return kNotSupported;
  }
  const bool ta = op->trans_a == lt::kTranspose;
  const bool tb = op->trans_b == lt::kTranspose;
  const auto [m, k] =
      ta ? std::tuple(a->cols, a->rows) : std::tuple(a->rows, a->cols);
  const auto [k2, n] =
      tb ? std::tuple(b->cols, b->rows) : std::tuple(b->rows, b->cols);
  if (k != k2 || m != d->rows || n != d->cols || c->rows != d->rows ||
      c->cols != d->cols || (c->type != d->type && !IsFp8(d->type))) {
    return kInvalidValue;
  }
  const bool fp8 = IsFp8(a->type) && IsFp8(b->type);
  if (!fp8 && (op->scale_a || op->scale_b)) return kNotSupported;
  if (!IsFp8(d->type) && op->scale_d) return kNotSupported;
  if (IsFp8(d->type) && op->epilogue != lt::kDefault) return kNotSupported;

  const Types* types =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Types& t) {
        return t.compute == op->compute && t.scale == op->scale &&
               (fp8 ? IsFp8(t.operands) &&
                          HasFp8Types(a->type, b->type, c->type, d->type)
                    : t.operands == a->type && t.operands == b->type &&
                          t.result == d->type);
      });
  if (types == std::end(kTypes)) return kNotSupported;
  if (op->epilogue != lt::kDefault && !types->epilogues) return kNotSupported;
  if (HasVector(op->epilogue) && op->vector == nullptr) return kInvalidValue;
  if (Has(op->epilogue, kBiasBit) && fp8 && d->type == lt::kR32F) {
    return kNotSupported;  // its bias is a bfloat16
  }
  if (Has(op->epilogue, kAuxBit) &&
      (op->aux == nullptr || op->aux_ld < int64_t(d->rows) ||
       !Multiples(8, {op->aux_ld, op->aux_stride}) ||
       (d->batch > 1 && op->aux_stride == 0))) {
    return kInvalidValue;
  }
  if (fp8 && !(ta && !tb &&
               Multiples(16, {int64_t(k), a->ld, b->ld, a->stride, b->stride,
                              int64_t(m) * numbers::Bytes(d->type),
                              d->ld * numbers::Bytes(d->type)}))) {
    return kNotSupported;
  }
  if (a->type == lt::kR8I &&
      !(ta && !tb &&
        Multiples(4, {int64_t(m), int64_t(k), a->ld, b->ld, d->ld}))) {
    return kNotSupported;
  }
  return lt::kSuccess;
}

// Of what an algorithm is for, all but pointers.
uint64_t Fingerprint(lt::MatmulDesc op, lt::Layout a, lt::Layout b,
                     lt::Layout c, lt::Layout d) {
  uint64_t hash = 14695981039346656037u;
  const auto add = [&](uint64_t value) {
    hash = (hash ^ value) * 1099511628211u;
  };
  for (lt::Layout m : {a, b, c, d}) {
    for (uint64_t v : {uint64_t(m->type), m->rows, m->cols, uint64_t(m->ld),
                       uint64_t(m->batch), uint64_t(m->stride)}) {
      add(v);
    }
  }
  for (uint64_t v :
       {uint64_t(op->compute), uint64_t(op->scale), uint64_t(op->trans_a),
        uint64_t(op->trans_b), uint64_t(op->epilogue), uint64_t(op->aux_ld),
        uint64_t(op->aux_stride)}) {
    add(v);
  }
  return hash;
}

uint64_t AlignmentOf(const void* pointer) {
  const auto bits = reinterpret_cast<uintptr_t>(pointer) | 256;
  return bits & -bits;
}

bool IsAligned(const void* pointer, lt::Layout m, uint64_t alignment) {
  const auto bits = reinterpret_cast<uintptr_t>(pointer);
  return bits % alignment == 0 &&
         (m->batch == 1 ||
          uint64_t(m->stride * numbers::Bytes(m->type)) % alignment == 0);
}

// An operand as the tensor cores read it.
Complex Operand(lt::ComputeType compute, lt::DataType type, const void* from,
                int64_t i) {
  const Complex x = numbers::Load(type, from, i);
  if (compute != lt::kCompute32FFastTF32) return x;
  return {numbers::Round(x.real(), 10, -126),
          numbers::Round(x.imag(), 10, -126)};
}

template <typename T>
lt::Result SetTo(T* to, const void* from, size_t size) {
  if (size != sizeof(T)) return kInvalidValue;
  std::memcpy(to, from, size);
  return lt::kSuccess;
}

}  // namespace

extern "C" {

lt::Result cublasLtCreate(lt::Handle* handle) {
  static lt::HandleData data;
  ++fake_handles;
  *handle = &data;
  return lt::kSuccess;
}

const char* cublasLtGetStatusName(lt::Result result) {
  switch (static_cast<int>(result)) {
    case 0:
      return "CUBLAS_STATUS_SUCCESS";
    case 7:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case 14:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case 15:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "CUBLAS_STATUS_UNKNOWN";
}

size_t cublasLtGetVersion() { return fake_version; }

lt::Result cublasLtMatmulDescCreate(lt::MatmulDesc* op, lt::ComputeType compute,
                                    lt::DataType scale) {
  ++fake_live;
  *op = new lt::MatmulDescData{.compute = compute, .scale = scale};
  return lt::kSuccess;
}

lt::Result cublasLtMatmulDescDestroy(lt::MatmulDesc op) {
  --fake_live;
  delete op;
  return lt::kSuccess;
}

lt::Result cublasLtMatmulDescSetAttribute(lt::MatmulDesc op,
                                          lt::MatmulDescAttribute attribute,
                                          const void* value, size_t size) {
  switch (attribute) {
    case lt::kTransA:
      return SetTo(&op->trans_a, value, size);
    case lt::kTransB:
      return SetTo(&op->trans_b, value, size);
    case lt::kEpilogue:
      return SetTo(&op->epilogue, value, size);
    case lt::kBiasPointer:
      return SetTo(&op->vector, value, size);
    case lt::kAuxPointer:
      return SetTo(&op->aux, value, size);
    case lt::kAuxLd:
      return SetTo(&op->aux_ld, value, size);
    case lt::kAuxBatchStride:
      return SetTo(&op->aux_stride, value, size);
    case lt::kScaleA:
      return SetTo(&op->scale_a, value, size);
    case lt::kScaleB:
      return SetTo(&op->scale_b, value, size);
    case lt::kScaleD:
      return SetTo(&op->scale_d, value, size);
    case lt::kFastAccumulation:
      return SetTo(&op->fast, value, size);
  }
  return kInvalidValue;
}

lt::Result cublasLtMatrixLayoutCreate(lt::Layout* layout, lt::DataType type,
                                      uint64_t rows, uint64_t cols,
                                      int64_t ld) {
  ++fake_live;
  *layout =
      new lt::LayoutData{.type = type, .rows = rows, .cols = cols, .ld = ld};
  return lt::kSuccess;
}

lt::Result cublasLtMatrixLayoutDestroy(lt::Layout layout) {
  --fake_live;
  delete layout;
  return lt::kSuccess;
}

lt::Result cublasLtMatrixLayoutSetAttribute(lt::Layout layout,
                                            lt::LayoutAttribute attribute,
                                            const void* value, size_t size) {
  switch (attribute) {
    case lt::kBatchCount:
      return SetTo(&layout->batch, value, size);
    case lt::kBatchStride:
      return SetTo(&layout->stride, value, size);
  }
  return kInvalidValue;
}

lt::Result cublasLtMatmulPreferenceCreate(lt::Preference* preference) {
  ++fake_live;
  *preference = new lt::PreferenceData;
  return lt::kSuccess;
}

lt::Result cublasLtMatmulPreferenceDestroy(lt::Preference preference) {
  --fake_live;
  delete preference;
  return lt::kSuccess;
}

lt::Result cublasLtMatmulPreferenceSetAttribute(
    lt::Preference preference, lt::PreferenceAttribute attribute,
    const void* value, size_t size) {
  switch (attribute) {
    case lt::kMaxWorkspaceBytes:
      return SetTo(&preference->workspace, value, size);
    case lt::kReductionSchemeMask:
      return SetTo(&preference->mask, value, size);
    case lt::kMinAlignmentA:
    case lt::kMinAlignmentB:
    case lt::kMinAlignmentC:
    case lt::kMinAlignmentD:
      return SetTo(&preference->alignment[attribute - lt::kMinAlignmentA],
                   value, size);
  }
  return kInvalidValue;
}

lt::Result cublasLtMatmulAlgoGetHeuristic(
    lt::Handle handle, lt::MatmulDesc op, lt::Layout a, lt::Layout b,
    lt::Layout c, lt::Layout d, lt::Preference preference, int requested,
    lt::HeuristicResult* result, int* returned) {
  ++fake_heuristics;
  *returned = 0;
  if (handle == nullptr || requested < 1) return kInvalidValue;
  if (fake_without_algorithm) return lt::kSuccess;
  if (lt::Result failed = Check(op, a, b, c, d)) return failed;
  const lt::Layout layouts[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    // Complex numbers are read in halves.
    const int64_t least =
        std::min<int64_t>(8, numbers::Bytes(layouts[i]->type));
    if (preference->alignment[i] < least) return kNotSupported;
    result->algorithm.data[i] = preference->alignment[i];
  }
  result->algorithm.data[4] = AlignmentOf(op->vector);
  result->algorithm.data[5] = AlignmentOf(op->aux);
  result->algorithm.data[6] = result->workspace_bytes =
      preference->workspace / 2;
  result->algorithm.data[7] = Fingerprint(op, a, b, c, d);
  result->state = lt::kSuccess;
  *returned = std::min<int>(requested, std::size(kCosts));
  for (int i = 1; i < *returned; ++i) {
    result[i] = result[0];
    result[i].algorithm.data[4] |= uint64_t(i) << 32;
  }
  fake_mask = preference->mask;
  return lt::kSuccess;
}

lt::Result cublasLtMatmulAlgoCheck(lt::Handle, lt::MatmulDesc op, lt::Layout a,
                                   lt::Layout b, lt::Layout c, lt::Layout d,
                                   const lt::Algorithm* algorithm,
                                   lt::HeuristicResult* result) {
  if (algorithm->data[7] != Fingerprint(op, a, b, c, d)) return kNotSupported;
  result->workspace_bytes = algorithm->data[6];
  return lt::kSuccess;
}

lt::Result cublasLtMatmul(lt::Handle handle, lt::MatmulDesc op,
                          const void* alpha_at, const void* a, lt::Layout a_is,
                          const void* b, lt::Layout b_is, const void* beta_at,
                          const void* c, lt::Layout c_is, void* d,
                          lt::Layout d_is, const lt::Algorithm* algorithm,
                          void* workspace, size_t workspace_bytes,
                          cudaStream_t) {
  ++fake_matmuls;
  if (fake_fail) return static_cast<lt::Result>(fake_fail);
  if (handle == nullptr) return kInvalidValue;
  if (lt::Result failed = Check(op, a_is, b_is, c_is, d_is)) return failed;
  const uint64_t* needs = algorithm->data;
  if (needs[7] != Fingerprint(op, a_is, b_is, c_is, d_is) ||
      !IsAligned(a, a_is, needs[0]) || !IsAligned(b, b_is, needs[1]) ||
      !IsAligned(c, c_is, needs[2]) || !IsAligned(d, d_is, needs[3]) ||
      AlignmentOf(op->vector) < uint32_t(needs[4]) ||
      AlignmentOf(op->aux) < needs[5] || (c == d && !(*c_is == *d_is)) ||
      (c == nullptr && !IsFp8(d_is->type)) || workspace_bytes < needs[6] ||
      (needs[6] > 0 && AlignmentOf(workspace) < 256)) {
    return kInvalidValue;
  }
  fake_candidate = static_cast<int>(needs[4] >> 32);
  if (kCosts[fake_candidate] == 0) return kNotSupported;
  fake_clock += kCosts[fake_candidate];
  if (needs[6] > 0) std::memset(workspace, 0xA5, needs[6]);
  fake_compute = op->compute;
  fake_fast = op->fast;
  fake_epilogue = static_cast<int>(op->epilogue);
  fake_batch = d_is->batch;

  const Complex alpha = numbers::Load(op->scale, alpha_at, 0);
  const Complex beta = numbers::Load(op->scale, beta_at, 0);
  const bool ta = op->trans_a == lt::kTranspose;
  const bool tb = op->trans_b == lt::kTranspose;
  const int64_t m = d_is->rows, n = d_is->cols;
  const int64_t k = ta ? a_is->rows : a_is->cols;
  const auto at_b = [&](int64_t batch, int64_t l, int64_t j) {
    return Operand(
        op->compute, b_is->type, b,
        batch * b_is->stride + (tb ? j + l * b_is->ld : l + j * b_is->ld));
  };
  for (int64_t batch = 0; batch < d_is->batch; ++batch) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < m; ++i) {
        Complex z = 0;
        for (int64_t l = 0; l < k; ++l) {
          z += Operand(op->compute, a_is->type, a,
                       batch * a_is->stride +
                           (ta ? l + i * a_is->ld : i + l * a_is->ld)) *
               at_b(batch, l, j);
        }
        z *= alpha;
        if (op->scale_a != nullptr) z *= double{*op->scale_a};
        if (op->scale_b != nullptr) z *= double{*op->scale_b};
        if (beta != 0.) {
          z += beta * numbers::Load(c_is->type, c,
                                    batch * c_is->stride + i + j * c_is->ld);
        }
        if (Has(op->epilogue, kBiasBit)) {
          z += numbers::Load(d_is->type, op->vector, i);
        }
        if (op->scale_d != nullptr) z *= double{*op->scale_d};
        const int64_t at_aux = batch * op->aux_stride + i + j * op->aux_ld;
        switch (op->epilogue) {
          case lt::kRelu:
          case lt::kReluBias:
            if (z.real() < 0) z = 0;
            break;
          case lt::kGeluAux:
          case lt::kGeluAuxBias:
            numbers::Store(d_is->type, op->aux, at_aux, z);
            [[fallthrough]];
          case lt::kGelu:
          case lt::kGeluBias:
            z = numbers::Gelu(z.real());
            break;
          case lt::kDGelu:
            z *= numbers::GeluDerivative(
                numbers::Load(d_is->type, op->aux, at_aux).real());
            break;
          default:
            break;
        }
        numbers::Store(d_is->type, d, batch * d_is->stride + i + j * d_is->ld,
                       z);
      }
    }
  }
  for (int64_t j = 0; op->epilogue == lt::kBGradB && j < n; ++j) {
    Complex sum = 0;
    for (int64_t l = 0; l < k; ++l) sum += at_b(0, l, j);
    numbers::Store(d_is->type, op->vector, j, sum);
  }
  return lt::kSuccess;
}

}  // extern "C"
