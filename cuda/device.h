// SPDX-License-Identifier: Apache-2.0
//
// What the machine has, as far as our kernels and cuBLASLt care.
#ifndef JAX_LAYOUT_CUDA_DEVICE_H_
#define JAX_LAYOUT_CUDA_DEVICE_H_

#include <string>

namespace jax_layout {

// Whether there is a device. Where there is none, programs may still be
// compiled for others'.
bool HasDevices();

// Why our kernels cannot run on the devices that are there, for a sentence that
// goes on with "is needed"; empty where they can, or none is there.
std::string WhyUnusable();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_DEVICE_H_
