# SPDX-License-Identifier: Apache-2.0
#
# nanobind and the headers of the XLA FFI and of oneDNN, all from Python packages
# that pyproject.toml requires for the build.
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# Found without importing jaxlib, which would load all of XLA.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('jaxlib').origin).parent / 'include')"
  OUTPUT_VARIABLE XLA_FFI_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h ffi_minor REGEX "#define XLA_FFI_API_MINOR")
message(STATUS "XLA FFI headers: ${XLA_FFI_INCLUDE_DIR} (${ffi_minor})")

# Without the headers, as on processors that the package is not for, the CPU GEMM
# does without oneDNN. The package's files are below sys.prefix, or the user's.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.metadata as m; print(next(f.locate().resolve().parents[2] for f in m.files('onednn-devel-cpu-gomp') if f.match('oneapi/dnnl/dnnl.h')))"
  OUTPUT_VARIABLE ONEDNN_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
message(STATUS "oneDNN headers: ${ONEDNN_INCLUDE_DIR}")
