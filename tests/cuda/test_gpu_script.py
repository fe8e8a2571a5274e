# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.sh where there is no GPU, so that on one the script is not what fails.

Each part runs as it stands; nvidia-smi, nvcc and the sanitizer are stand-ins, the
kernels run on the host, and benchmarks on the CPU, on a case or two.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("rich")

from benchmarks import score
from benchmarks.buffers import DeviceBuffers
from benchmarks.gemm import compare
from benchmarks.harness import Timing, measure
from benchmarks.native import cuda_library
from benchmarks.peers import cuda_peers
from benchmarks.permute import check
from benchmarks.permute_cases import PermuteCase
from benchmarks.results import CaseResult
from native import ROOT

if not shutil.which("g++"):
    pytest.skip("needs g++", allow_module_level=True)

NAME = "NVIDIA_H100_80GB_HBM3"
STAND_INS = {
    "nvidia-smi": """
case "$*" in
  *compute_cap*) echo 9.0 ;;
  *) echo NVIDIA H100 80GB HBM3 ;;
esac""",
    # What it is told to run, without its own options.
    "compute-sanitizer": """
[ "$1 $3 $4" = "--tool --error-exitcode 1" ] || exit 2
shift 4
exec "$@" """,
    # Kernels for the host, of which a block takes a millisecond.
    "nvcc": """
case " $* " in *" -ptx "*) exec "$REAL_NVCC" "$@" ;; esac
out= sources= gemm= shared=
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2; shift ;;
    -shared) shared="-shared -fPIC" ;;
    *cuda_check_gemm.cu) gemm=$1 ;;
    *.cu | *.cc) [ -e "$1" ] || exit 3; sources="$sources $1" ;;
  esac
  shift
done
if [ -n "$gemm" ]; then  # no more than linked, as there is no cuBLASLt
  g++ -std=c++20 -O0 -w -Itests/cuda/fake_cublaslt -I. $sources -xc++ "$gemm" -xnone \\
    -ldl -o "$out.host" || exit
  printf '#!/bin/sh\\necho stands in\\n' > "$out"
  exec chmod +x "$out"
fi
g++ -std=c++20 -O0 -w -fno-strict-aliasing $shared -Itests/cuda/emulation -I. -xc++ \\
  $sources tests/cuda/emulation/emulation.cc -o "$out.host" || exit
if [ -n "$shared" ]; then exec mv "$out.host" "$out"; fi
printf '#!/bin/sh\\nexec "%s" --at-most 20000\\n' "$(realpath "$out.host")" > "$out"
chmod +x "$out" """,
    "python": f"""
echo $$ > "$OUT/python.pid"
case "$*" in
  "-m pip "*) echo "pip $*" ;;
  *) exec "{sys.executable}" "$@" ;;
esac""",
}


def nvcc():
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_ins")
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text.strip()}\n")
        (folder / name).chmod(0o755)
    if nvcc():  # the model asks it what becomes of the kernels
        ptxas = Path(nvcc()).resolve().with_name("ptxas")
        (folder / "ptxas").symlink_to(ptxas)
    # No torch: it takes seconds to import, and each benchmark is a process.
    (folder / "site").mkdir()
    (folder / "site" / "torch.py").write_text("raise ImportError('left out')\n")
    paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    arch = f"90_{folder.name}"  # a folder below build of its own
    built = ROOT / "build" / f"gpu_{arch}"
    shutil.rmtree(built, ignore_errors=True)  # what is there is not built again
    yield os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(folder / "python"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ARCH": arch,
        "REAL_NVCC": str(Path(nvcc()).resolve()) if nvcc() else "",
        "DEVICE": "cpu",
        "JAX_PLATFORMS": "cpu",
    }
    shutil.rmtree(built, ignore_errors=True)


# Options of a benchmark's, none of which has more to do than this.
QUICK = "--quick --rounds 1 --seconds 0.01 --case"
PARTS = {
    "checks": {"TESTS": "--collect-only"},
    "kernels": {"BENCH": f"{QUICK} 'patchify 16 float32' 'select: 64x64'"},
    "choices": {"CHOOSE": "--seconds 0.01 --only 'permute 1,0 float32 256x64'"},
    "products": {"BENCH": f"{QUICK} 'batched float32' '16x4096->4096, gelu bfloat16'"},
    "attention": {"BENCH": f"{QUICK} '256 NN float32' 'of 512x8, float32'"},
    "programs": {"BENCH": f"{QUICK} 'ViT block' 'Flax: bidirectional LSTM'"},
    "host": {
        "BENCHES": "attention linear",
        "BENCH": f"{QUICK} 'of 512x8, float32' '16x4096->4096, gelu bfloat16'",
        "CHOOSE": "--seconds 0.01 --only 'permute 1,0 float32 256x64'",
        "TESTS": "--collect-only tests/products/test_gemm_tiles.py",
    },
}
RESULTS = {
    "checks": (),
    "kernels": ("permute", "index"),
    "choices": ("choices",),
    "products": ("gemm", "linear"),
    "attention": ("attention", "gemm_highest"),
    "programs": ("layout", "programs"),
    "host": ("choices", "attention", "linear"),
}


def start(environment, out, part, **more):
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), part],
        # A folder for the lock, as others may measure.
        env=environment | {"OUT": str(out), "TMPDIR": str(out)} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def parts(environment, tmp_path_factory):
    """All parts, at the same time."""
    folder = tmp_path_factory.mktemp("out")
    running = {
        part: start(environment, folder / part, part, **more)
        for part, more in PARTS.items()
    }
    yield folder, running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("part", PARTS)
def test_every_step_passes(parts, part):
    folder, running = parts
    said, _ = running[part].communicate(timeout=300)
    log = (folder / part / f"{part}_{NAME}.log").read_text()
    assert running[part].returncode == 0, log[-6000:]
    assert "FAILED" not in log and f"{part}: passed" in said
    for name in RESULTS[part]:
        file = f"host_{NAME}/{name}.json" if part == "host" else f"{name}_{NAME}.json"
        found = json.loads((folder / part / file).read_text())
        cases = found["cases"] if isinstance(found, dict) else found
        assert len(cases) > 0, name
    assert not list((folder / part).glob("*.partial"))
    for step in STEPS[part]:
        assert f"== {step}: passed" in said


STEPS = {part: [f"benchmark {n}" for n in RESULTS[part]] for part in PARTS}
STEPS["choices"] = ["choices"]
STEPS["host"] = ["host_needs", "host"]
STEPS["checks"] = (
    "needs,build cuda_check,build cuda_check_gemm,cuda_check,cuda_check_gemm,"
    "memcheck,racecheck,synccheck,initcheck,tests".split(",")
)


@pytest.mark.skipif(not nvcc(), reason="the model needs nvcc")
def test_predictions_of_what_was_measured(environment, parts):
    """On another machine, which has no GPU to ask."""
    folder, running = parts
    out = folder / "kernels"
    assert running["kernels"].wait(timeout=300) == 0
    name = NAME.replace("_", " ")
    said, _ = start(environment, out, "predictions", GPU=name).communicate(timeout=300)
    assert "== predictions: passed" in said, said
    assert json.loads((out / f"predicted_{NAME}.json").read_text())


def partial_cases(path):
    return len(json.loads(path.read_text())["cases"]) if path.exists() else 0


def wait_until(true, process):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)


def test_what_is_killed_leaves_what_it_has(environment, tmp_path):
    """A step; then the script, by what a machine sends that is taken away."""
    out = tmp_path / "out"
    more = "--rounds 1000000 --seconds 0.5 --case 'n: p v' '16x4096->4096, gelu'"
    process = start(environment, out, "products", BENCH=more)
    first, second = (out / f"{name}_{NAME}.partial" for name in ("gemm", "linear"))
    try:
        wait_until(lambda: partial_cases(first) > 0, process)
        os.kill(int((out / "python.pid").read_text()), signal.SIGKILL)
        wait_until(second.exists, process)  # the next step
        assert partial_cases(first) > 0
        child = int((out / "python.pid").read_text())
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "benchmark gemm: FAILED with status 137" in said and "stopped after" in said
    log = (out / f"products_{NAME}.log").read_text()
    assert "[1/" in log and log.endswith(" s\n")  # each step's own words, too
    assert second.exists() and not os.path.exists(f"/proc/{child}")


def test_bad_parts_are_refused(environment, tmp_path):
    process = start(environment, tmp_path / "out", "everything")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "usage: benchmarks/gpu.sh checks |" in said


def test_kernels_timed_by_events(environment, tmp_path, monkeypatch):
    """The program that calls them, over memory of the host."""
    for name in ("PATH", "REAL_NVCC"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("CUDACXX", shutil.which("nvcc", path=environment["PATH"]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    library = cuda_library("cuda_permute", cuda_peers.KERNELS)
    case = PermuteCase("ml", "small", (6, 40, 2), (1, 0, 2), "bfloat16")
    buffers = DeviceBuffers(case, jax.devices("cpu")[0])
    assert buffers.sets == 4 and buffers.x[0].min() >= 1
    contenders = cuda_peers.on_device(case, buffers, library)
    names = ["kernel", "copy kernel", "cudaMemcpyAsync"]
    assert [c.family for c in contenders] == names
    expected = buffers.expected(case)
    values = np.asarray(buffers.x[0]).view("u2")
    np.testing.assert_array_equal(expected, values.transpose(case.axes))
    assert [check(c, expected) for c in contenders] == [None] * 3
    assert check(contenders[0], expected + 1) == "wrong result"
    samples = measure(contenders, Timing(rounds=2, sample_seconds=0, blocking=False))
    result = CaseResult("ml", "small", case.config, 2 * case.nbytes, tuple(samples))
    assert all(s.median > 0 and s.warm for s in samples)
    microseconds, share = score.measured(result)
    assert microseconds == 1e6 * samples[0].median and share > 0


def test_what_tf32_may_be_off():
    expected = np.ones(3, np.float32)
    off = expected + np.float32(1e-3)
    assert compare(off, expected, "float32", tf32=True) is None
    assert "wrong" in compare(off, expected, "float32", tf32=False)
    assert "wrong" in compare(off, expected, "float64", tf32=True)
    assert "wrong" in compare(off + 0.01, expected, "complex64", tf32=True)


def test_a_failure_is_told_at_once(tmp_path):
    """And what reads programs, or is marked, is left out."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from hlo import compiled, count\n"
        "@pytest.mark.cpu\n"
        "def test_of_cpus(): assert 3 == 4\n"
        "def test_program(): assert compiled(abs, 1) == ''\n"
        "def test_values(): assert 1 == 2\n"
        "def test_after(): print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "on_a_gpu", "-s", "-q", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed, 2 deselected" in done.stdout
    assert -1 < done.stdout.find("assert 1 == 2") < done.stdout.find("after\n")
