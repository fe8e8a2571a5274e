// SPDX-License-Identifier: Apache-2.0
//
// Any other processor.
#include "cpu/permute/bytes16.h"

namespace jax_layout {

const PermuteFunctions kPermutePortable = {
    16,
    0,
    {TransposeBlock<Bytes16, 1>, TransposeBlock<Bytes16, 2>,
     TransposeBlock<Bytes16, 4>, TransposeBlock<Bytes16, 8>,
     TransposeBlock<Bytes16, 16>},
    {},
    MoveBlock<Bytes16>,
    CopyBlock<Bytes16>,
    nullptr,
};

}  // namespace jax_layout
