# SPDX-License-Identifier: Apache-2.0
#
# The CUDA backend's toolkit, behind one switch:
#
#   pip install . -C cmake.define.JAX_LAYOUT_CUDA=ON
#
# A system toolkit comes first (CUDACXX, CUDA_HOME, nvcc on PATH,
# /usr/local/cuda). Otherwise the wheels that jax[cuda13] installs, in the
# Python that builds: nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt,
# nvidia-cuda-runtime and nvidia-cuda-cccl, all of one 13.x version; pip needs
# --no-build-isolation to see them. No GPU is needed to build.
#
# Architectures: -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 for an H100 alone.
# The runtime is linked statically and cuBLASLt opened when first used, so the
# module loads without CUDA and nothing of cuBLASLt is needed to build.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  # Ampere, Hopper, Blackwell, and PTX for what comes after.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 CACHE STRING "CUDA architectures")
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(JAX_LAYOUT_NVCC nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT JAX_LAYOUT_NVCC)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')"
      OUTPUT_VARIABLE nvidia_wheels OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(TRANSFORM nvidia_wheels APPEND /cu13/bin)
    find_program(JAX_LAYOUT_NVCC nvcc PATHS ${nvidia_wheels} NO_DEFAULT_PATH)
  endif()
  if(NOT JAX_LAYOUT_NVCC)
    message(FATAL_ERROR
      "JAX_LAYOUT_CUDA needs nvcc. Install a CUDA toolkit, or\n"
      "  pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' "
      "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'\n"
      "and build with pip's --no-build-isolation.")
  endif()
  set(CMAKE_CUDA_COMPILER ${JAX_LAYOUT_NVCC})
endif()

# The wheels keep their libraries in lib, where neither nvcc nor CMake looks;
# CMake links a program with nvcc before this project can say where.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_bin)
if(EXISTS ${cuda_bin}/../lib/libcudart_static.a)
  string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${cuda_bin}/../lib")
endif()

enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # unknown to CMake before 3.26
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

# The runtime's headers for the handlers, which the host compiler builds.
# CMake links the static library itself, as the module has CUDA sources.
add_library(jax_layout_cudart INTERFACE)
target_include_directories(jax_layout_cudart SYSTEM INTERFACE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
