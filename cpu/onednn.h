// SPDX-License-Identifier: Apache-2.0
//
// oneDNN through its C interface. The library is loaded at run time: any 3.x
// with threads of OpenMP or without threads.
#ifndef JAX_LAYOUT_CPU_ONEDNN_H_
#define JAX_LAYOUT_CPU_ONEDNN_H_

#include <utility>

#include "core/dtype.h"
#include "oneapi/dnnl/dnnl.h"
#include "oneapi/dnnl/dnnl_debug.h"

namespace jax_layout {

// Every function of the library that is used.
#define JAX_LAYOUT_ONEDNN_FUNCTIONS(X)                  \
  X(convolution_backward_data_primitive_desc_create)    \
  X(convolution_backward_weights_primitive_desc_create) \
  X(convolution_forward_primitive_desc_create)          \
  X(cpu_isa2str)                                        \
  X(engine_create)                                      \
  X(get_effective_cpu_isa)                              \
  X(matmul_primitive_desc_create)                       \
  X(memory_create)                                      \
  X(memory_desc_clone)                                  \
  X(memory_desc_create_submemory)                       \
  X(memory_desc_create_with_strides)                    \
  X(memory_desc_create_with_tag)                        \
  X(memory_desc_destroy)                                \
  X(memory_desc_equal)                                  \
  X(memory_desc_get_size)                               \
  X(memory_desc_query)                                  \
  X(memory_destroy)                                     \
  X(memory_set_data_handle)                             \
  X(post_ops_append_eltwise)                            \
  X(post_ops_append_sum)                                \
  X(post_ops_create)                                    \
  X(post_ops_destroy)                                   \
  X(primitive_attr_create)                              \
  X(primitive_attr_destroy)                             \
  X(primitive_attr_set_post_ops)                        \
  X(primitive_attr_set_scratchpad_mode)                 \
  X(primitive_create)                                   \
  X(primitive_desc_destroy)                             \
  X(primitive_desc_query)                               \
  X(primitive_desc_query_md)                            \
  X(primitive_destroy)                                  \
  X(primitive_execute)                                  \
  X(reorder_primitive_desc_create)                      \
  X(set_max_cpu_isa)                                    \
  X(status2str)                                         \
  X(stream_create)                                      \
  X(stream_destroy)                                     \
  X(version)

struct Onednn {
#define X(name) decltype(&dnnl_##name) name = nullptr;
  JAX_LAYOUT_ONEDNN_FUNCTIONS(X)
#undef X
  // OpenMP's, null where the library has no threads.
  int (*omp_get_max_threads)() = nullptr;
  void (*omp_set_num_threads)(int) = nullptr;
  dnnl_engine_t engine = nullptr;

  bool loaded() const { return engine != nullptr; }
};

// The library, loaded by the first call.
const Onednn& OnednnLibrary();

// While it lives, the library uses no thread but the calling one: the pool's
// threads are all there are. The setting is the thread's own.
class OnednnSequential {
 public:
  OnednnSequential() {
    const Onednn& dnnl = OnednnLibrary();
    if (dnnl.omp_set_num_threads == nullptr) return;
    threads_ = dnnl.omp_get_max_threads();
    if (threads_ != 1) dnnl.omp_set_num_threads(1);
  }
  ~OnednnSequential() {
    if (threads_ != 1) OnednnLibrary().omp_set_num_threads(threads_);
  }
  OnednnSequential(const OnednnSequential&) = delete;
  OnednnSequential& operator=(const OnednnSequential&) = delete;

 private:
  int threads_ = 1;
};

// An object of the library, destroyed with its owner.
template <class T, dnnl_status_t (*Onednn::*destroy)(T)>
class OnednnOwned {
 public:
  OnednnOwned() = default;
  OnednnOwned(OnednnOwned&& other) noexcept
      : object_(std::exchange(other.object_, {})) {}
  OnednnOwned& operator=(OnednnOwned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~OnednnOwned() {
    if (object_ != nullptr) (OnednnLibrary().*destroy)(object_);
  }
  operator T() const { return object_; }
  T* out() { return &object_; }

 private:
  T object_ = nullptr;
};

namespace onednn {
using MemoryDesc =
    OnednnOwned<dnnl_memory_desc_t, &Onednn::memory_desc_destroy>;
using Memory = OnednnOwned<dnnl_memory_t, &Onednn::memory_destroy>;
using PostOps = OnednnOwned<dnnl_post_ops_t, &Onednn::post_ops_destroy>;
using Attr =
    OnednnOwned<dnnl_primitive_attr_t, &Onednn::primitive_attr_destroy>;
using PrimitiveDesc =
    OnednnOwned<dnnl_primitive_desc_t, &Onednn::primitive_desc_destroy>;
using Primitive = OnednnOwned<dnnl_primitive_t, &Onednn::primitive_destroy>;
using Stream = OnednnOwned<dnnl_stream_t, &Onednn::stream_destroy>;
}  // namespace onednn

dnnl_data_type_t OnednnType(DType type);

// Whether the library sums products of int8 exactly. Its kernels without VNNI
// add pairs of them in 16 bits, which saturate.
bool OnednnSumsInt8();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ONEDNN_H_
