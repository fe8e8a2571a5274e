// SPDX-License-Identifier: Apache-2.0
//
// oneDNN's matmul.
#include "cpu/gemm/libraries.h"

#if __has_include(<oneapi/dnnl/dnnl.h>)
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "cpu/gemm/tiles.h"
#include "cpu/onednn.h"

namespace jax_layout {
namespace {

using namespace onednn;

const Onednn& Library() { return OnednnLibrary(); }

Status Failure(dnnl_status_t status, const GemmProblem& problem) {
  if (status == dnnl_success) return Status::Ok();
  return Status::Error(std::string("gemm: oneDNN reports ") +
                       Library().status2str(status) + " for " + Text(problem) +
                       ".");
}

// A pool thread's own: memory that is too large to ask for at each call, and
// the last product's memory objects, which cost as much as a tiny product.
struct ThreadState {
  Stream stream;
  int64_t product = 0;  // its id
  std::array<Memory, 5> memories;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
  size_t bytes = 0;

  char* Reserve(size_t wanted) {
    if (wanted > bytes) {
      memory.reset(static_cast<char*>(
          std::aligned_alloc(4096, CeilDiv(wanted, 4096) * 4096)));
      bytes = memory ? wanted : 0;
    }
    return memory.get();
  }
};

// How much the library does.
enum class Way {
  kFused,    // all: product and epilogue
  kProduct,  // the product
  kWidened,  // the product of 16-bit operands that were converted to f32
};

// One product of a tile's shape.
struct Product {
  MemoryDesc a, b, bias, y, scratchpad;
  Primitive primitive;
  int64_t id = 0;  // unlike that of any other
  size_t scratchpad_bytes = 0;
  std::string implementation;
};

// What the library does to a product: all, or nothing. It cannot do all that
// the epilogue can, nor all of it in the order that is asked for, and its relu
// of NaN is 0.
bool CanFuse(const GemmProblem& problem) {
  return !problem.aux && problem.activation != Activation::kRelu &&
         problem.derivative == Activation::kNone &&
         problem.result != DType::kS32 &&
         (problem.alpha == 1. || !problem.bias);
}

bool Finishes(const GemmProblem& problem) {
  return problem.alpha != 1. || problem.beta != 0. || problem.bias ||
         problem.aux || problem.activation != Activation::kNone ||
         problem.derivative != Activation::kNone;
}

dnnl_status_t MakeAttr(const GemmProblem& problem, Way way, Attr* attr) {
  const Onednn& dnnl = Library();
  PostOps ops;
  dnnl_status_t status = dnnl.primitive_attr_create(attr->out());
  if (!status) {
    status = dnnl.primitive_attr_set_scratchpad_mode(*attr,
                                                     dnnl_scratchpad_mode_user);
  }
  if (!status) status = dnnl.post_ops_create(ops.out());
  auto eltwise = [&](dnnl_alg_kind_t kind, float alpha) {
    if (!status) {
      status = dnnl.post_ops_append_eltwise(ops, kind, alpha, 0.f);
    }
  };
  if (way == Way::kFused) {
    if (problem.alpha != 1.) {
      eltwise(dnnl_eltwise_linear, static_cast<float>(problem.alpha.real()));
    }
    if (!status && problem.beta != 0.) {
      status =
          dnnl.post_ops_append_sum(ops, static_cast<float>(problem.beta.real()),
                                   0, dnnl_data_type_undef);
    }
    if (problem.activation == Activation::kGelu) {
      eltwise(dnnl_eltwise_gelu_tanh, 0.f);
    } else if (problem.activation == Activation::kGeluErf) {
      eltwise(dnnl_eltwise_gelu_erf, 0.f);
    }
  }
  if (!status) status = dnnl.primitive_attr_set_post_ops(*attr, ops);
  return status;
}

dnnl_status_t MakeProduct(const GemmProblem& problem, Way way, DType y_type,
                          int64_t y_ld, int64_t rows, int64_t cols,
                          Product* product) {
  const Onednn& dnnl = Library();
  const GemmPlan& plan = problem.plan;
  Attr attr;
  dnnl_status_t status = MakeAttr(problem, way, &attr);
  auto matrix = [&](MemoryDesc* desc, int64_t m, int64_t n, DType type,
                    bool transposed, int64_t ld) {
    const dnnl_dims_t dims = {m, n};
    const dnnl_dims_t strides = {transposed ? 1 : ld, transposed ? ld : 1};
    if (!status) {
      status = dnnl.memory_desc_create_with_strides(desc->out(), 2, dims,
                                                    OnednnType(type), strides);
    }
  };
  auto operand = [&](MemoryDesc* desc, int64_t m, int64_t n,
                     const GemmMatrix& of) {
    const bool widened = way == Way::kWidened;
    matrix(desc, m, n, widened ? DType::kF32 : problem.operands, of.transposed,
           widened ? (of.transposed ? m : n) : of.ld);
  };
  operand(&product->a, rows, plan.k, plan.a);
  operand(&product->b, plan.k, cols, plan.b);
  matrix(&product->y, rows, cols, y_type, false, y_ld);
  if (way == Way::kFused && problem.bias) {
    matrix(&product->bias, 1, cols, problem.result, false, cols);
  }
  PrimitiveDesc desc;
  if (!status) {
    status = dnnl.matmul_primitive_desc_create(desc.out(), dnnl.engine,
                                               product->a, product->b,
                                               product->bias, product->y, attr);
  }
  if (status) return status;
  const char* implementation = "";
  status = dnnl.primitive_desc_query(desc, dnnl_query_impl_info_str, 0,
                                     &implementation);
  if (status) return status;
  // Reference code is slower than anything.
  product->implementation = implementation;
  if (product->implementation.starts_with("ref")) return dnnl_unimplemented;
  // The description of the scratchpad belongs to desc: this is a copy's size.
  const_dnnl_memory_desc_t scratchpad =
      dnnl.primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
  product->scratchpad_bytes = dnnl.memory_desc_get_size(scratchpad);
  const dnnl_dims_t bytes = {static_cast<int64_t>(product->scratchpad_bytes)};
  const dnnl_dims_t dense = {1};
  if (!status) {
    status = dnnl.memory_desc_create_with_strides(product->scratchpad.out(), 1,
                                                  bytes, dnnl_u8, dense);
  }
  if (!status) status = dnnl.primitive_create(product->primitive.out(), desc);
  static std::atomic<int64_t> last_id = 0;
  product->id = ++last_id;
  return status;
}

struct State {
  GemmProblem problem;
  Way way;
  GemmTiling tiling;
  bool stage = false;  // the product goes to memory of the thread first
  int64_t product_ld = 0;
  std::array<Product, 4> products;  // last rows: + 1, last columns: + 2

  const Product& ProductOf(const GemmTile& tile) const {
    return products[(tile.rows != tiling.rows) +
                    2 * (tile.cols != tiling.cols)];
  }
};

dnnl_status_t MakeState(const GemmProblem& problem, Way way, State* state) {
  const GemmPlan& plan = problem.plan;
  // f32 kernels are as good on blocks of columns, and a block of some 512 x 512
  // is best; those of 16 bits are for whole rows of y.
  const bool f32 = problem.operands == DType::kF32 || way == Way::kWidened;
  state->problem = problem;
  state->way = way;
  state->tiling = MakeGemmTiling(plan, {.tasks_per_thread = 2,
                                        .min_rows = f32 ? 64 : 32,
                                        .min_cols = 64,
                                        .rows_first = !f32});
  GemmTiling& tiling = state->tiling;
  // The kernel for a few rows and transposed b gets slow on long tiles: 8 x
  // 4096 x 4096 makes 55 GFLOP/s on a thread in tiles of 64 columns, 35 in 512.
  if (f32 && plan.b.transposed && plan.m > 2 && plan.m <= 8 && plan.n > 64) {
    tiling.cols = 64;
    tiling.col_tiles = CeilDiv(plan.n, tiling.cols);
  }
  const bool wide =
      problem.result == DType::kF32 || problem.result == DType::kS32;
  // A tile of y does not stay in cache if its rows are a power of two apart.
  state->stage = way != Way::kFused && (!wide || Finishes(problem));
  state->product_ld = state->stage ? tiling.cols : plan.y.ld;
  const DType y_type = state->stage && !wide ? DType::kF32 : problem.result;
  const int64_t last_rows = plan.m - (tiling.row_tiles - 1) * tiling.rows;
  const int64_t last_cols = plan.n - (tiling.col_tiles - 1) * tiling.cols;
  for (int i = 0; i < 4; ++i) {
    const bool last_row = i & 1, last_col = i & 2;
    if ((last_row && last_rows == tiling.rows) ||
        (last_col && last_cols == tiling.cols)) {
      continue;
    }
    const dnnl_status_t status =
        MakeProduct(problem, way, y_type, state->product_ld,
                    last_row ? last_rows : tiling.rows,
                    last_col ? last_cols : tiling.cols, &state->products[i]);
    if (status) return status;
  }
  return dnnl_success;
}

// Tries the ways that give the right result, the fastest first.
Status MakeState(const GemmProblem& problem, std::shared_ptr<State>* state) {
  const OnednnSequential sequential;
  dnnl_status_t status = dnnl_unimplemented;
  for (Way way : {Way::kFused, Way::kProduct, Way::kWidened}) {
    if (way == Way::kFused && !CanFuse(problem)) continue;
    if (way == Way::kWidened && ItemSize(problem.operands) != 2) continue;
    *state = std::make_shared<State>();
    status = MakeState(problem, way, state->get());
    if (status != dnnl_unimplemented) break;
  }
  if (status == dnnl_success) return Status::Ok();
  return Failure(status, problem);
}

dnnl_status_t RunTile(const State& state, const GemmTile& tile) {
  static thread_local ThreadState thread;
  const Onednn& dnnl = Library();
  const OnednnSequential sequential;
  const GemmPlan& plan = state.problem.plan;
  const Product& product = state.ProductOf(tile);

  const bool widened = state.way == Way::kWidened;
  auto pages = [](int64_t bytes) { return CeilDiv(bytes, 4096) * 4096; };
  auto floats = [&](bool needed, int64_t m, int64_t n) {
    return needed ? pages(sizeof(float) * m * n) : 0;
  };
  const int64_t y_bytes = floats(state.stage, tile.rows, state.product_ld);
  const int64_t a_bytes = floats(widened, tile.rows, plan.k);
  const int64_t b_bytes = floats(widened, plan.k, tile.cols);
  char* memory = thread.Reserve(y_bytes + a_bytes + b_bytes +
                                pages(product.scratchpad_bytes + 1));
  if (memory == nullptr) return dnnl_out_of_memory;
  char* y = state.stage ? memory : tile.y;
  memory += y_bytes;
  const char* a = tile.a;
  const char* b = tile.b;
  auto widen = [&](const GemmMatrix& matrix, const char*& x, int64_t rows,
                   int64_t cols, int64_t bytes) {
    if (!widened) return;
    if (matrix.transposed) std::swap(rows, cols);
    WidenToF32(state.problem.operands, x, matrix.ld, rows, cols,
               reinterpret_cast<float*>(memory));
    x = memory;
    memory += bytes;
  };
  widen(plan.a, a, tile.rows, plan.k, a_bytes);
  widen(plan.b, b, plan.k, tile.cols, b_bytes);

  dnnl_status_t status = dnnl_success;
  if (thread.stream == nullptr) {
    status = dnnl.stream_create(thread.stream.out(), dnnl.engine,
                                dnnl_stream_in_order);
  }
  if (thread.product != product.id) thread.memories = {};
  std::array<dnnl_exec_arg_t, 5> args;
  int count = 0;
  auto bind = [&](int arg, const_dnnl_memory_desc_t desc, const void* data) {
    Memory& object = thread.memories[count];
    void* handle = const_cast<void*>(data);
    if (!status) {
      status = object != nullptr ? dnnl.memory_set_data_handle(object, handle)
                                 : dnnl.memory_create(object.out(), desc,
                                                      dnnl.engine, handle);
    }
    args[count++] = {arg, object};
  };
  bind(DNNL_ARG_SRC, product.a, a);
  bind(DNNL_ARG_WEIGHTS, product.b, b);
  bind(DNNL_ARG_DST, product.y, y);
  if (product.bias != nullptr) bind(DNNL_ARG_BIAS, product.bias, tile.bias);
  bind(DNNL_ARG_SCRATCHPAD, product.scratchpad, memory);
  thread.product = status ? 0 : product.id;
  if (!status) {
    status = dnnl.primitive_execute(product.primitive, thread.stream, count,
                                    args.data());
  }
  if (!status && state.stage) {
    FinishGemm(state.problem, state.problem.alpha, state.problem.beta,
               {tile.rows, tile.cols, y, state.product_ld, tile.bias, tile.y,
                tile.aux, plan.y.ld});
  }
  return status;
}

}  // namespace

bool OnednnSupports(const GemmProblem& problem) {
  const DType in = problem.operands, out = problem.result;
  const bool types = (in == DType::kF32 && out == in) ||
                     ((in == DType::kBF16 || in == DType::kF16) &&
                      (out == in || out == DType::kF32)) ||
                     (in == DType::kS8 && out == DType::kS32);
  if (!types || !Library().loaded()) return false;
  if (in == DType::kS8 && !OnednnSumsInt8()) return false;
  // What it has kernels for depends on the processor and on strides.
  std::shared_ptr<State> state;
  return MakeState(problem, &state).ok();
}

Status ChooseOnednn(const GemmProblem& problem, GemmFunction* run) {
  std::shared_ptr<State> state;
  Status status = MakeState(problem, &state);
  *run = [state](const GemmBuffers& buffers, const Executor& executor) {
    return ForEachGemmTile(state->problem, state->tiling, buffers, executor,
                           [&](const GemmTile& tile) {
                             return Failure(RunTile(*state, tile),
                                            state->problem);
                           });
  };
  return status;
}

std::string OnednnTarget() {
  const Onednn& dnnl = Library();
  return dnnl.loaded() ? dnnl.cpu_isa2str(dnnl.get_effective_cpu_isa()) : "";
}

}  // namespace jax_layout

#else  // built without its headers

namespace jax_layout {

bool OnednnSupports(const GemmProblem&) { return false; }
Status ChooseOnednn(const GemmProblem&, GemmFunction*) {
  return Status::Error("gemm: built without oneDNN.");
}
std::string OnednnTarget() { return ""; }

}  // namespace jax_layout
#endif
