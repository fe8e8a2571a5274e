// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <string>

namespace jax_layout {
namespace {

// What cmake/cuda.cmake builds for, and what is newer.
constexpr int kCapability = 8;

std::string Dotted(int version) {
  return std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10);
}

// 0 without a driver.
int DriverVersion() {
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) return version;
  (void)cudaGetLastError();
  return 0;
}

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

}  // namespace

bool HasDevices() { return DriverVersion() > 0 && DeviceCount() > 0; }

std::string WhyUnusable() {
  int needed = 0;
  const int driver = DriverVersion();
  if (driver == 0 || cudaRuntimeGetVersion(&needed) != cudaSuccess) return "";
  // Any minor version of the runtime runs on any of the driver's.
  if (driver / 1000 < needed / 1000) {
    return "the driver is for CUDA " + Dotted(driver) + ", where " +
           Dotted(needed / 1000 * 1000);
  }
  const int devices = DeviceCount();
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                               device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                               device) != cudaSuccess) {
      (void)cudaGetLastError();
      return "";
    }
    if (major < kCapability) {
      return "device " + std::to_string(device) + " has compute capability " +
             std::to_string(major) + "." + std::to_string(minor) + ", where " +
             std::to_string(kCapability) + ".0";
    }
  }
  return "";
}

}  // namespace jax_layout
