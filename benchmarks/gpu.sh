#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU. For a machine with an NVIDIA GPU, jax with its CUDA
# plugin, nvcc 13, and what pyproject.toml needs to build and test; no network.
#
#   benchmarks/gpu.sh checks | choices | kernels | products | attention | programs
#   benchmarks/gpu.sh host | predictions
#
# checks    kernels without Python, under compute-sanitizer too; tests
# choices   what is ours: a table for jax_layout/tables
# kernels   permutes beside copies; rows by index
# products  products of heads, linear layers
# attention attention by cuDNN; matrices without TF32
# programs  whole programs, as they are and with ours
# host      the machine's own processor, a Xeon with AMX, in pairs side by side: choices,
#           then tests of attention and products on its tiles, benchmarks
# predictions  permutes beside what was predicted of them: after kernels, needs no GPU,
#           but its name in GPU
#
# A part builds what it needs that is not there. It ends within eight minutes: a step
# gets what is left of them, at most its own limit.
#
# OUT     the folder of the results, benchmarks/results/gpu by default. Each step's
#         output is there from its first line on, each benchmark's numbers from its
#         first case on (.partial, until it has all of them): a part that is killed
#         leaves what it has.
# PYTHON  the interpreter, python3 by default
# WHEELS  a folder of wheels to install first, without what they depend on
# GPU     its name, asked by default
# ARCH    its compute capability without the dot, asked by default
# DEVICE  jax's name of the platform, gpu by default
# BENCH   more options for all benchmarks, such as '--quick --case "4 NT"'
# CHOOSE  more options for the choices, such as '--only permute'
# TESTS   more options for pytest
# BENCHES the benchmarks of the part host
# MINUTES another limit than eight
#
# Every step runs even when one before it failed; the exit status tells.
set -u -o pipefail
cd "$(dirname "$0")/.."

part=${1:-}
case $part in
  checks | choices | kernels | products | attention | programs | host | predictions) ;;
  *)
    sed -n 's/^#   /usage: /p' "$0" | head -n 2 >&2
    exit 2
    ;;
esac

python=${PYTHON:-python3}
platform=${DEVICE:-gpu}
asked() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
device=$(echo "${GPU:-$(asked name)}" | tr -cs '[:alnum:]\n' '_')
arch=${ARCH:-$(asked compute_cap | tr -d .)}
device=${device:-unknown} arch=${arch:-90}
out=${OUT:-benchmarks/results/gpu}
build=build/gpu_$arch
mkdir -p "$out" "$build"
log=$out/${part}_$device.log
: > "$log"
end=$((SECONDS + 60 * ${MINUTES:-8} - 20))
failed=0
child=

say() { echo "== $*" | tee -a "$log"; }

# The step that runs ends with the script.
stop() {
  say "stopped after $SECONDS s"
  # shellcheck disable=SC2046  # several
  kill $child $(jobs -p) 2> /dev/null
  wait
  exit 143
}
trap stop TERM INT HUP

# step SECONDS NAME COMMAND...: runs it, at most that long, and says how it went.
step() {
  local limit=$1 name=$2 start=$SECONDS status=0 from
  shift 2
  if [ $((end - SECONDS)) -lt "$limit" ]; then limit=$((end - SECONDS)); fi
  if [ "$limit" -lt 3 ]; then
    say "$name: FAILED, as no time is left"
    failed=1
    return
  fi
  say "$name: $*"
  from=$(wc -l < "$log")
  # timeout hands signals on, and bash itself sees to them only while it waits.
  timeout --kill-after 5 "$limit" "$@" >> "$log" 2>&1 &
  child=$!
  wait "$child" || status=$?
  child=
  tail -n "+$((from + 1))" "$log" | tail -n 15
  if [ "$status" -eq 0 ]; then
    say "$name: passed in $((SECONDS - start)) s"
  else
    say "$name: FAILED with status $status in $((SECONDS - start)) s"
    failed=1
  fi
}

# bench SECONDS NAME MODULE OPTIONS...: a benchmark, with its numbers in NAME.
bench() {
  local limit=$1 name=$2 module=$3 more
  shift 3
  eval "more=(${BENCH:-})"
  step "$limit" "benchmark $name" "$python" -m "benchmarks.$module" "$@" \
    --json "$out/${name}_$device.json" "${more[@]}"
}

if [ -n "${WHEELS:-}" ]; then
  step 60 wheels "$python" -m pip install --quiet --no-index --no-deps --upgrade \
    --target "$build/site" "$WHEELS"/*.whl
  export PYTHONPATH=$PWD/$build/site${PYTHONPATH:+:$PYTHONPATH}
fi
step 60 needs "$python" -c 'import importlib.util as u, sys
names = "jax numpy opt_einsum platformdirs safetensors scipy rich pytest hypothesis"
missing = [name for name in names.split() if not u.find_spec(name)]
sys.exit("not installed, so give their wheels: " + " ".join(missing) if missing else 0)'
# Beside nvcc where it is not on PATH itself.
nvcc=$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
export CUDACXX=$nvcc XLA_PYTHON_CLIENT_PREALLOCATE=false
tests=tests${PYTHONPATH:+:$PYTHONPATH}

built='import sys; from jax_layout import _backends as b; sys.exit(not b.available("cuda"))'
if ! "$python" -c "$built" >> "$log" 2>&1; then
  step 200 build "$python" -m pip install --no-build-isolation --no-deps --no-index -e . \
    -C cmake.define.JAX_LAYOUT_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$arch-real"
fi

# compiled NAME SOURCES...: tests/cuda/NAME.cu and others, unless these have been.
compiled() {
  local name=$1 sum
  shift
  sum=$(find core cuda tests/cuda \( -name '*.cu*' -o -name '*.cc' -o -name '*.h' \) -print0 |
    sort -z | xargs -0 cat | sha256sum | cut -c 1-12)
  program=$build/${name}_$sum
  [ -x "$program" ] || step 120 "build $name" "$nvcc" -std=c++20 -O3 -lineinfo \
    -arch="sm_$arch" -I. -o "$program" "tests/cuda/$name.cu" "$@" -ldl
}

checks() {
  local tool program
  compiled cuda_check cuda/permute/permute.cu cuda/index/index.cu
  local permutes=$program
  compiled cuda_check_gemm cuda/gemm/{gemm,choose,cublaslt,tuning}.cc cuda/device.cc
  local gemm=$program
  step 90 cuda_check "$permutes" --huge
  # jax loads cuBLASLt from its wheel; our check is told where that is.
  step 60 cuda_check_gemm "$gemm" $("$python" -c 'import glob, nvidia
print(*[f for p in nvidia.__path__ for f in glob.glob(p + "/cu13/lib/libcublasLt.so.13")][:1])' 2> /dev/null)
  # The tools slow a kernel down by tens; small arrays have all of its branches.
  for tool in memcheck racecheck synccheck initcheck; do
    step 60 "$tool" "$sanitizer" --tool "$tool" --error-exitcode 1 \
      "$permutes" --at-most 300000
  done
  # Several processes share the GPU, where pytest-xdist is installed. Bounds are
  # float32's, so that nothing may be rounded to TF32; XLA times no kernels of its own, and
  # has no products of Triton's, whose sums of int8 are twice what they should be.
  local workers
  workers=$("$python" -c 'import xdist; print("-n 14 --dist worksteal")' 2> /dev/null)
  # shellcheck disable=SC2086  # several options
  step 480 tests env JAX_DEFAULT_MATMUL_PRECISION=highest PYTHONPATH="$tests" \
    XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \
    "$python" -m on_a_gpu -q --no-header --tb=short $workers ${TESTS:-}
}

kernels() {
  export JAX_LAYOUT_CHOICES=kernels
  bench 240 permute permute --device "$platform" --seconds 1
  bench 150 index index --device "$platform" --seconds 0.5
}

choices() {
  local more
  eval "more=(${CHOOSE:-})"
  # A table is written when the last case is measured, so that none is begun too late.
  step 460 choices "$python" -m benchmarks.choose --device "$platform" --total 380 \
    --output "$out/choices_$device.json" "${more[@]}"
}

# To compile a product takes seconds, in which XLA tries its kernels. All are timed, also
# those that are XLA's by default.
products() {
  export JAX_LAYOUT_CHOICES=kernels
  bench 160 gemm gemm --device "$platform" --seconds 0.5 --set attention
  bench 300 linear linear --device "$platform" --seconds 0.5
}

attention() {
  export JAX_LAYOUT_CHOICES=kernels
  bench 300 attention attention --device "$platform" --seconds 0.5
  bench 160 gemm_highest gemm --device "$platform" --seconds 0.3 --set square --highest
}

programs() {
  # What is compared is not rounded to TF32 on one side alone.
  export JAX_DEFAULT_MATMUL_PRECISION=highest
  bench 200 layout layout --seconds 1
  bench 300 programs programs --seconds 0.5
}

# Its processors two by two. Without oneDNN and OpenBLAS, which come with the package
# elsewhere, choices and benchmarks would be of less than users have.
host() {
  export JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=
  step 30 host_needs "$python" -c 'import sys
from jax_layout._backends import library
files = {"onednn-cpu-gomp": "libdnnl.so.3", "scipy-openblas32": "libscipy_openblas.so"}
missing = [name for name, file in files.items() if not library(name, file)]
sys.exit("not installed, so give their wheels: " + " ".join(missing) if missing else 0)'
  local minutes=$(((end - SECONDS - 10) / 6))
  # shellcheck disable=SC2086  # several names
  step 460 host "$python" -m benchmarks.side_by_side --out "$out/host_$device" \
    --minutes "$((minutes / 10)).$((minutes % 10))" \
    --choices="${CHOOSE---total 200}" --more="${BENCH:-}" \
    --tests="${TESTS-tests/attention tests/products/test_gemm_tiles.py}" \
    --only ${BENCHES:-conv operators layout programs permute-ml index attention linear gemm}
}

predictions() {
  step 400 predictions env PYTHONPATH="$tests" "$python" -m benchmarks.score \
    "$out/permute_$device.json" --gpu "$device" --json "$out/predicted_$device.json"
}

"$part"
say "$part: $([ "$failed" -eq 0 ] && echo passed || echo FAILED) in $SECONDS s, results in $out"
exit "$failed"
