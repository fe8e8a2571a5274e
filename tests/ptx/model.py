# SPDX-License-Identifier: Apache-2.0
"""How long a GPU should take for what the machine counted: nothing is measured.

A multiprocessor is a closed network of queues: as many blocks as fit are on their way
through it, each needs so many cycles of the memory, of the second-level cache, of
shared memory, of the path to it and of the schedulers, and waits for latencies in
between. Mean value analysis (Reiser and Lavenberg, 1980) gives the blocks that leave
per cycle: few where latencies leave the queues empty, what the busiest lets through
where they do not.

The constants are data sheets', others' measurements and two guesses (slices, START),
and not fitted to the transposes that tests/ptx/test_model.py compares with. Latencies
are known to a third; where they decide, so is the prediction.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Device:
    name: str
    architecture: int
    bandwidth: float  # GB/s of the memory, as its maker says
    multiprocessors: int
    clock: float  # GHz, under load
    latency: int  # cycles of a load from memory, while little else goes on
    slices: int  # of the second-level cache, 64 bytes a cycle each
    shared: int  # bytes of a multiprocessor, of which each block takes 1 KB besides


DEVICES = {
    d.name: d
    for d in (
        Device("A100", 80, 2039, 108, 1.41, 570, 80, 164 << 10),
        Device("H100", 90, 3352, 132, 1.755, 600, 80, 228 << 10),
        Device("H100 PCIe", 90, 2039, 114, 1.755, 600, 80, 228 << 10),
        Device("H200", 90, 4800, 132, 1.755, 600, 96, 228 << 10),
        Device("B200", 100, 8000, 148, 1.85, 800, 160, 228 << 10),
    )
}
COPY = 0.92  # of the bandwidth that long copies reach, on all of them
START = 400  # cycles from a block's end to its successor's first instruction
BARRIER = 30
LAUNCH = 2.0  # us between kernels of a stream


def resident(device, threads, registers, shared):
    """Blocks on a multiprocessor."""
    warps = ceil(threads / 32)
    per_warp = ceil(registers * 32 / 256) * 256
    return min(
        32,
        2048 // (warps * 32),
        65536 // (per_warp * warps),
        device.shared // (ceil(shared / 128) * 128 + 1024),
    )


def demands(device, c):
    """Cycles that a block needs of each part, if it were alone there."""
    share = device.multiprocessors / c.blocks  # of what all multiprocessors share
    once, again = c.block_sectors_loaded, c.sectors_loaded - c.block_sectors_loaded
    full = once + c.sectors_stored - c.partial_sectors_stored
    memory = (once + c.block_sectors_stored) * 32
    return {
        "memory": memory * share / (device.bandwidth * COPY / device.clock),
        # Two sectors a cycle; part of one is read, merged and written back.
        "cache": (full / 2 + 2 * c.partial_sectors_stored) * share / device.slices,
        # What a block has loaded before is in its first-level cache.
        "path": ((once + c.sectors_stored) / 2 + again / 4) / c.blocks,
        "shared": c.shared_passes / c.blocks,
        "issue": c.instructions / 4 / c.blocks,
    }


def waiting(device, c):
    """Cycles of a block in which it needs nothing of those."""
    exposed = sum(max(0, device.latency - hidden) for hidden in c.waits)
    return START + exposed + c.cycles + c.barriers / c.blocks * BARRIER


def cycles_per_block(needs, delay, blocks):
    """Of a multiprocessor with so many blocks: mean value analysis.

    What a block needs is no matter of chance, so that one finds the block before it
    half done (the residual life of a constant), and not all of its work to come.
    """
    queues, busy = dict.fromkeys(needs, 0.0), dict.fromkeys(needs, 0.0)
    for n in range(1, blocks + 1):
        times = {k: need * (1 + queues[k] - busy[k] / 2) for k, need in needs.items()}
        rate = min(n / (delay + sum(times.values())), 1 / max(needs.values()))
        queues = {k: rate * t for k, t in times.items()}
        busy = {k: rate * need for k, need in needs.items()}
    return 1 / rate


@dataclass(frozen=True)
class Prediction:
    microseconds: float
    rate: float  # GB/s, read and written
    bound: str  # the part with the most to do, or latency
    blocks: int  # resident on a multiprocessor
    in_flight: int  # bytes, of a multiprocessor
    # What blocks ask the memory for, sectors, lets no more than this share of a copy
    # through, were that all that takes time.
    achievable: float


def predict(device, counters, size, blocks, threads, registers, shared):
    """From the counters of some of a launch's blocks; it moves `size` bytes."""
    fits = resident(device, threads, registers, shared)
    needs, delay = demands(device, counters), waiting(device, counters)
    share = blocks / device.multiprocessors
    each = [cycles_per_block(needs, delay, n) for n in range(1, fits + 1)]
    if share <= fits:  # one wave
        cycles = max(share * each[ceil(share) - 1], delay + sum(needs.values()))
    else:  # the last leave one after the other
        cycles = (share - fits) * each[-1] + sum(each)
    busiest = max(needs, key=needs.get)
    full = needs[busiest] * share / cycles > 0.7
    warps = ceil(threads / 32) * min(fits, ceil(share))
    sectors = counters.block_sectors_loaded + counters.block_sectors_stored
    microseconds = LAUNCH + cycles / device.clock / 1e3
    return Prediction(
        microseconds,
        2 * size / microseconds / 1e3,
        busiest if full else "latency",
        fits,
        counters.bytes_in_flight * warps,
        min(1, 2 * size * counters.blocks / blocks / 32 / sectors),
    )
