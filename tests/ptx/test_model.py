# SPDX-License-Identifier: Apache-2.0
"""The model ranks kernels whose speed others have published, and says what it must of
ours. Its predictions are no measurements."""

import math

import numpy as np
import pytest

from benchmarks.permute_cases import all_cases
from native import cuda_emulation
from ptx import Virtual, model, predict, toolkit

H100 = model.DEVICES["H100"]
PLANTED = "tests/ptx/planted.cu"
# GB/s of 32768^2 floats on an H100 (yencal/gpu-matrix-transpose).
PUBLISHED = {"Naive": 475, "Unpadded": 996, "Padded": 1693, "Coarsened": 2772}


@pytest.fixture(scope="session")
def host():
    return toolkit.Host(cuda_emulation())


def textbook(name, n=32768):
    threads = (32, 8 if name == "Coarsened" else 32)
    size, grid = 4 * n * n, (n // 32, n // 32)
    memory = [
        Virtual(size, 8, predict.zeros),
        Virtual(size, 9, store=lambda at, raw: None),
    ]
    blocks = math.prod(grid)
    some = [blocks * k // 8 for k in range(8)]
    counters = toolkit.module(PLANTED, 90).launch(
        name, grid, threads, [*memory, n], blocks=some
    )
    registers, shared, _ = toolkit.resources(PLANTED, 90)[name]
    found = model.predict(H100, counters, blocks, math.prod(threads), registers, shared)
    return 2 * size / found.microseconds / 1e3, found


def test_published_transposes():
    predicted = {name: textbook(name)[0] for name in PUBLISHED}
    assert sorted(predicted, key=predicted.get) == sorted(PUBLISHED, key=PUBLISHED.get)
    ratios = {name: predicted[name] / PUBLISHED[name] for name in PUBLISHED}
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios.values()), ratios


def test_what_bounds_them():
    bounds = {name: textbook(name)[1].bound for name in PUBLISHED}
    assert bounds["Naive"] == "cache" and bounds["Coarsened"] == "memory"
    assert bounds["Padded"] == "latency"


def test_published_vectors(host):
    """Tiles of 64 x 64 with 16-byte accesses: 2940 GB/s."""
    found, counters, name = predict.predict(host, H100, (32768, 32768), (1, 0), 4)
    assert toolkit.kernel_name(name) == "tile 4 16 64 256"
    assert 0.85 <= 8 * 32768**2 / found.microseconds / 1e3 / 2940 <= 1.15
    assert counters.bank_conflicts == {}


def test_occupancy():
    assert model.resident(H100, 256, 32, 0) == 8
    assert model.resident(H100, 256, 40, 0) == 6
    assert model.resident(H100, 256, 64, 16 << 10) == 4
    assert model.resident(H100, 64, 32, 32 << 10) == 6
    assert model.resident(H100, 32, 16, 0) == 32


def test_a_longer_wait_or_a_longer_queue_is_slower():
    alone = model.cycles_per_block({"memory": 100.0}, 900, 1)
    assert alone == 1000
    many = [model.cycles_per_block({"memory": 100.0}, 900, n) for n in range(1, 33)]
    assert all(a >= b for a, b in zip(many, many[1:], strict=False))
    assert 500 < many[1] < 510 and many[-1] == 100


@pytest.mark.parametrize("case", all_cases()["ml"], ids=lambda c: f"{c.name} {c.dtype}")
def test_predictions(host, case):
    """Of copies of as many bytes: what each family must reach."""
    share, found, counters, name = predict.share_of_copy(
        host, H100, case.shape, case.axes, case.np_dtype.itemsize
    )
    kernel = toolkit.kernel_name(name).split()
    if kernel[0] in ("tile", "rows") and "16" in kernel[1:3]:
        for side in ("loaded", "stored"):
            ideal = getattr(counters, f"ideal_sectors_{side}")
            assert getattr(counters, f"sectors_{side}") <= 1.05 * ideal
        assert counters.bank_conflicts == {}
    assert share > 0.6, (share, found)


def test_devices():
    assert {d.architecture for d in model.DEVICES.values()} == set(
        toolkit.ARCHITECTURES
    )
    assert np.all(
        [d.bandwidth / d.multiprocessors > 10 for d in model.DEVICES.values()]
    )
