#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, in one go: build, tests, sanitizers, benchmarks. For a
# machine with an NVIDIA GPU, jax with its CUDA plugin, nvcc 13, and what
# pyproject.toml needs to build; no network.
#
#   benchmarks/gpu.sh [checks | benchmarks]
#
# Either part takes up to ten minutes and builds what it needs.
#
# PYTHON  the interpreter, python3 by default
# ARCH    the GPU's compute capability without the dot, asked by default
# OUT     a folder that gets a copy of the results
#
# Every step runs even when one before it failed; the exit status tells.
set -u -o pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs '[:alnum:]\n' '_')
arch=${ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}
device=${device:-unknown} arch=${arch:-90}
check=build/cuda_check_$arch
mkdir -p benchmarks/results build
log=benchmarks/results/gpu_$device.log
: > "$log"

part=${1:-all}
failed=0
# step SECONDS NAME COMMAND...: runs it, at most that long, and says how it went.
step() {
  local limit=$1 name=$2 start=$SECONDS status
  shift 2
  echo "== $name: $*" | tee -a "$log"
  timeout "$limit" "$@" 2>&1 | tee -a "$log" | tail -n 15
  status=${PIPESTATUS[0]}
  if [ "$status" -eq 0 ]; then
    echo "== $name: passed in $((SECONDS - start)) s" | tee -a "$log"
  else
    echo "== $name: FAILED with status $status in $((SECONDS - start)) s" | tee -a "$log"
    failed=1
  fi
}

# Beside nvcc where it is not on PATH itself.
nvcc=$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")

# jax loads it from its wheel; our check is told where that is.
cublaslt=$("$python" -c 'import glob, nvidia
print(*[f for p in nvidia.__path__ for f in glob.glob(p + "/cu13/lib/libcublasLt.so.13")][:1])' 2>/dev/null)

step 180 build "$python" -m pip install --no-build-isolation --no-deps --no-index -e . \
  -C cmake.define.JAX_LAYOUT_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$arch-real"
if [ "$part" != benchmarks ]; then
  step 60 "configure cuda_check" cmake -S . -B "$check" -DPython_EXECUTABLE="$(command -v "$python")" \
    -DJAX_LAYOUT_CUDA=ON -DJAX_LAYOUT_CUDA_CHECK=ON -DCMAKE_CUDA_ARCHITECTURES="$arch-real"
  step 120 "build cuda_check" cmake --build "$check" --target cuda_check cuda_check_gemm --parallel
  step 60 cuda_check "$check/cuda_check" --huge
  step 60 cuda_check_gemm "$check/cuda_check_gemm" $cublaslt
  step 120 memcheck "$sanitizer" --tool memcheck --error-exitcode 1 "$check/cuda_check"
  step 120 racecheck "$sanitizer" --tool racecheck --error-exitcode 1 "$check/cuda_check"
  # Several processes share the GPU, where pytest-xdist is installed.
  workers=$("$python" -c 'import xdist; print("-n 8")' 2>/dev/null)
  step 420 tests env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -q $workers tests
fi
if [ "$part" != checks ]; then
  for benchmark in permute gemm linear; do
    step 180 "benchmark $benchmark" "$python" -m "benchmarks.$benchmark" --device gpu \
      --seconds 1 --json "benchmarks/results/${benchmark}_$device.json"
  done
fi

if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT" && cp "$log" "$OUT/"
  cp benchmarks/results/*"$device"*.json "$OUT/" 2>/dev/null || echo "no results to copy"
fi
exit "$failed"
