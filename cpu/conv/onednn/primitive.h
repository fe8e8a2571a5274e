// SPDX-License-Identifier: Apache-2.0
//
// Convolutions and moves of oneDNN's: what it is told of memory, and its
// primitives. Only where the library's headers are.
#ifndef JAX_LAYOUT_CPU_CONV_ONEDNN_PRIMITIVE_H_
#define JAX_LAYOUT_CPU_CONV_ONEDNN_PRIMITIVE_H_

#include <array>
#include <cstdint>
#include <string>

#include "core/conv/problem.h"
#include "cpu/onednn.h"

namespace jax_layout::onednn {

enum ArrayId { kX, kW, kY, kBias, kArrays };

// How the library is to compute a problem.
struct Way {
  int64_t block = 1;  // of the channels of x and y; 1: they are innermost
  bool any = false;   // whatever kernel it has, be it slow
};

ArrayId ResultId(ConvPass pass);

// The order of weights without groups, the spatial axes always three:
// "ODHWI64o" of what the library calls Acdb64a. "" if it pads them, or has
// groups.
std::string WeightsFormat(const ConvProblem& p, const_dnnl_memory_desc_t desc);

// The caller's.
DType UserType(const ConvProblem& p, ArrayId id);

// Axes of an array, and where they lie.
struct Box {
  int rank = 0;
  dnnl_dims_t dims = {}, strides = {};
  void Add(int64_t extent, int64_t stride) {
    dims[rank] = extent;
    strides[rank++] = stride;
  }
};

// The caller's x, w or y. The inner part of blocks is an axis, the last.
Box UserBox(const ConvProblem& p, ArrayId id);

dnnl_status_t Describe(const Box& box, dnnl_data_type_t type, MemoryDesc* desc);

struct Scratchpad {
  MemoryDesc desc;
  int64_t bytes = 0;

  dnnl_status_t Make(const_dnnl_primitive_desc_t primitive);
};

// Copies an array into another order or type.
struct Move {
  MemoryDesc from, to;
  Primitive primitive;
  Scratchpad scratchpad;

  // Of `from` and `to` as they are.
  dnnl_status_t Make();
  dnnl_status_t Run(const void* source, void* target, void* memory) const;
};

// An array of a part.
struct Array {
  bool used = true;
  DType type = DType::kF32;  // of the library's
  MemoryDesc desc;           // the library's
  bool moved = false;        // it is not the caller's
  Move move;                 // from the caller's, or to it
  int64_t bytes = 0;         // of the library's
};

// One part's shape.
struct Convolution {
  ConvProblem problem;
  std::array<Array, kArrays> arrays;
  Primitive primitive;
  Scratchpad scratchpad;
  std::string implementation;
};

// The memory that the library sees of x or y, of array->type; `result`: it is
// written. Described anew with the caller's axes where it has more of them.
dnnl_status_t MakeActivation(const ConvProblem& p, ArrayId id, const Way& way,
                             DType user_type, bool result, Array* array);

// `weights`: their order, null to let the library choose.
dnnl_status_t MakeConvolution(const ConvProblem& p, const Way& way,
                              const_dnnl_memory_desc_t weights,
                              Convolution* conv);

// `data`: of the caller or moved, by ArrayId.
dnnl_status_t RunConvolution(const Convolution& conv,
                             const std::array<char*, kArrays>& data,
                             char* scratchpad);

}  // namespace jax_layout::onednn

#endif  // JAX_LAYOUT_CPU_CONV_ONEDNN_PRIMITIVE_H_
