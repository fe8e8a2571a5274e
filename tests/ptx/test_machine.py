# SPDX-License-Identifier: Apache-2.0
"""The machine is to be trusted: it finds what was planted, and nothing else."""

import numpy as np
import pytest

from ptx import Buffer, Defect, Module, toolkit

PLANTED = "tests/ptx/planted.cu"


def launch(kernel, words=64, shared=256):
    y = np.arange(words, dtype=np.uint32)
    toolkit.module(PLANTED, 90).launch(kernel, 1, 64, [y], shared=shared)
    return y


DEFECTS = {
    "Bounds": "an access of 4 bytes out of bounds, at byte 256 .*thread 63.*st.global",
    "Alignment": "a misaligned access of 8 bytes .*thread 0.*st.global.v2",
    "SharedAlignment": "a misaligned access of 16 bytes .*thread 0.*st.shared.v4",
    "SharedBounds": "out of the 256 bytes of shared memory .*thread 63",
    "LocalBounds": "out of the 32 bytes of local memory .*thread 8",
    "Unwritten": "shared memory that nothing wrote .*thread 58",
    "Exit": "a barrier that this thread does not reach .*thread 7",
    "TwoBarriers": "a barrier that this thread does not reach",
    "Race": "a race: no barrier since another thread stored this",
    "LateRace": "a race: no barrier since another thread used this .*thread 0",
    "InstructionRace": "a race: no barrier since another thread used this .*thread 0",
    "GlobalRace": "a race: another thread stored something else here .*thread 0",
    "ReadOnly": "a read-only load of what this kernel stored",
    "Constant": "a store to constant memory",
    "Shuffle": "a shuffle that not all lanes of its mask reach",
    "Asynchronous": "shared memory that nothing wrote",
    "Unknown": "does not know .*: nanosleep.u32 20",
}


@pytest.mark.parametrize("name", DEFECTS)
def test_planted(name):
    sizes = {"Asynchronous": (256, 1024)}.get(name, ())
    launch(f"{name}Mended", *sizes)
    with pytest.raises(Defect, match=rf"^{name}: line \d+: .*{DEFECTS[name]}"):
        launch(name, *sizes)


def test_results_of_planted_kernels():
    thread = np.arange(64)
    np.testing.assert_array_equal(launch("RaceMended"), 63 - thread)
    np.testing.assert_array_equal(launch("LateRaceMended"), 1)
    np.testing.assert_array_equal(launch("ShuffleMended"), thread ^ 1)
    y = launch("AsynchronousMended", 256, 1024)
    np.testing.assert_array_equal(y[64:], np.arange(64, 256))


def ptx(body):
    return Module(
        ".version 8.8\n.target sm_90\n.address_size 64\n"
        ".visible .entry f(\n.param .u64 f_param_0,\n.param .u64 f_param_1\n)\n{\n"
        ".reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<20>;\n.reg .b64 %rd<20>;\n"
        ".reg .f32 %f<9>;\n.reg .f64 %fd<9>;\n"
        "ld.param.u64 %rd1, [f_param_0];\nld.param.u64 %rd2, [f_param_1];\n"
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd4, %rd1, %rd3;\n"
        "ld.v4.u32 {%r2, %r3, %r4, %r5}, [%rd4];\nmul.wide.u32 %rd3, %r1, 8;\n"
        "add.s64 %rd5, %rd2, %rd3;\n" + body + "\nret;\n}\n"
    )


def run(body, *columns):
    """The 64 bits of %rd9, for each of 32 threads; columns are %r2, %r3, ..."""
    x = np.zeros((32, 4), np.uint32)
    for c, values in enumerate(columns):
        x[:, c] = values
    y = np.zeros(32, np.uint64)
    ptx(body + "\nst.global.u64 [%rd5], %rd9;").launch("f", 1, 32, [x, y])
    return y


RANDOM = np.random.default_rng(0).integers(0, 1 << 32, (3, 32), np.uint32)
A, B, C = RANDOM.astype(object)  # of Python's integers
SIGNED = RANDOM.view(np.int32).astype(object)
SHIFTS = np.arange(32) * 3


def expect(values, bits):
    return np.array([int(v) & ((1 << bits) - 1) for v in values], np.uint64)


@pytest.mark.parametrize(
    "body, want, bits",
    [
        ("mul.hi.u32 %r9, %r2, %r3;", A * B >> 32, 32),
        ("mul.hi.s32 %r9, %r2, %r3;", SIGNED[0] * SIGNED[1] >> 32, 32),
        ("mad.lo.s32 %r9, %r2, %r3, %r4;", A * B + C, 32),
        ("mul.wide.s32 %rd9, %r2, %r3;", SIGNED[0] * SIGNED[1], 64),
        ("mad.wide.u32 %rd9, %r2, %r3, %rd3;", A * B + 8 * np.arange(32), 64),
        ("shr.s32 %r9, %r2, 5;", SIGNED[0] >> 5, 32),
        ("shf.l.wrap.b32 %r9, %r2, %r3, 8;", (B << 32 | A) << 8 >> 32, 32),
        ("shf.r.clamp.b32 %r9, %r2, %r3, 40;", B, 32),
        ("lop3.b32 %r9, %r2, %r3, %r4, 0xCA;", A & B | ~A & C, 32),
        ("bfe.u32 %r9, %r2, 3, 7;", A >> 3 & 127, 32),
        ("bfi.b32 %r9, %r2, %r3, 4, 8;", B & ~0xFF0 | (A & 255) << 4, 32),
        ("min.s32 %r9, %r2, %r3;", np.minimum(SIGNED[0], SIGNED[1]), 32),
        ("max.u32 %r9, %r2, %r3;", np.maximum(A, B), 32),
        ("neg.s32 %r9, %r2;", -A, 32),
        ("prmt.b32 %r9, %r2, %r3, 0x7531;",
         A >> 8 & 255 | (A >> 24) << 8 | (B >> 8 & 255) << 16 | (B >> 24) << 24, 32),
        ("prmt.b32 %r9, %r2, %r3, 0xFFFC;",
         [(0xFF if b >> 7 & 1 else 0) | (0xFFFFFF00 if b >> 31 else 0)
          for b in B], 32),
        ("cvt.s64.s32 %rd9, %r2;", SIGNED[0], 64),
        ("cvt.s32.s8 %r9, %r2;", (A & 255) - 256 * (A >> 7 & 1), 32),
        ("mov.b64 %rd9, {%r2, %r3};", B << 32 | A, 64),
        ("mov.b64 %rd6, {%r2, %r3};\nmov.b64 {%r8, %r9}, %rd6;", B, 32),
        ("mov.b64 %rd6, {%r2, %r3};\nmov.b64 %rd7, {%r4, %r2};"
         "\nmul.hi.u64 %rd9, %rd6, %rd7;", (B << 32 | A) * (A << 32 | C) >> 64, 64),
        ("setp.lt.s32 %p1, %r2, %r3;\nselp.b32 %r9, %r2, %r3, %p1;",
         np.minimum(SIGNED[0], SIGNED[1]), 32),
        ("setp.gt.u32 %p2, %r4, 7;\nsetp.lo.and.u32 %p1|%p3, %r2, %r3, !%p2;"
         "\nselp.u32 %r9, 1, 0, %p1;", 0 * A, 32),
        ("@%p1 mov.u32 %r9, 3;\nsetp.lt.u32 %p1, %r1, 8;\nmov.u32 %r9, 1;"
         "\n@%p1 mov.u32 %r9, 2;", 1 + (np.arange(32) < 8), 32),
        ("shfl.sync.idx.b32 %r9, %r2, 4, 0x181F, -1;", [A[i // 8 * 8 + 4]
         for i in range(32)], 32),
        ("shfl.sync.bfly.b32 %r9, %r2, 5, 31, -1;", [A[i ^ 5] for i in range(32)], 32),
        # Lanes 0 to 15 leave the loop early, and wait for the others after it.
        ("mov.u32 %r9, 0;\nL1:\nadd.s32 %r9, %r9, 1;\nsetp.lt.u32 %p1, %r9, %r1;"
         "\n@%p1 bra L1;\nshl.b32 %r9, %r9, 1;", 2 * np.maximum(1, np.arange(32)), 32),
    ],
)  # fmt: skip
def test_instruction(body, want, bits):
    if bits == 32:
        body += "\ncvt.u64.u32 %rd9, %r9;"
    np.testing.assert_array_equal(run(body, *RANDOM), expect(want, bits))


@pytest.mark.parametrize("how", ["shl.b32", "shr.u32"])
def test_a_shift_beyond_the_width_is_nothing(how):
    body = f"{how} %r9, %r2, %r3;\ncvt.u64.u32 %rd9, %r9;"
    shifted = [
        int(a) << s if how == "shl.b32" else int(a) >> s
        for a, s in zip(A, SHIFTS, strict=True)
    ]
    np.testing.assert_array_equal(run(body, RANDOM[0], SHIFTS), expect(shifted, 32))


def test_floats():
    a, b = (np.random.default_rng(1).standard_normal((2, 32)) * 100).astype("f4")
    for op in ("add", "sub", "mul", "div.rn", "min", "max"):
        f = getattr(
            np,
            {
                "sub": "subtract",
                "mul": "multiply",
                "div.rn": "divide",
                "min": "minimum",
                "max": "maximum",
            }.get(op, op),
        )
        body = (
            f"mov.b32 %f1, %r2;\nmov.b32 %f2, %r3;\n{op}.f32 %f3, %f1, %f2;\n"
            "mov.b32 %r9, %f3;\ncvt.u64.u32 %rd9, %r9;"
        )
        got = (
            run(body, a.view(np.uint32), b.view(np.uint32)).astype(np.uint32).view("f4")
        )
        np.testing.assert_array_equal(got, f(a, b))


@pytest.mark.parametrize("text", ["fancy.new.u32 %r9, %r2", "bfe.s32 %r9, %r2, 24, 8"])
def test_an_unknown_instruction_is_an_error_with_its_text(text):
    with pytest.raises(Defect, match=rf"line 23: .*know.*: {text}"):
        run(f"{text};")


def test_counters():
    """Columns of 33 floats: a bank each; of 32, one bank for all."""
    module = toolkit.module(PLANTED, 90)
    n = 64
    x = np.arange(n * n, dtype=np.float32).reshape(n, n)
    reports = {}
    for name in ("Naive", "Unpadded", "Padded", "Coarsened"):
        y = np.zeros_like(x)
        block = (32, 8 if name == "Coarsened" else 32)
        reports[name] = module.launch(name, (2, 2), block, [x, y, n])
        np.testing.assert_array_equal(y, x.T)
    requests = n * n // 32
    naive, unpadded, padded, coarsened = reports.values()
    assert (naive.requests_loaded, naive.requests_stored) == (requests, requests)
    assert (naive.sectors_loaded, naive.sectors_stored) == (4 * requests, 32 * requests)
    assert naive.ideal_sectors_stored == naive.block_sectors_stored == 4 * requests
    assert naive.partial_sectors_stored == 32 * requests
    assert unpadded.sectors_stored == padded.sectors_stored == 4 * requests
    assert list(unpadded.bank_conflicts.values()) == [31 * requests]
    assert padded.bank_conflicts == coarsened.bank_conflicts == {}
    assert padded.shared_passes == 2 * requests and padded.barriers == 4
    assert padded.bytes_in_flight == 128 and coarsened.bytes_in_flight == 4 * 128


def test_pointers_of_structures_lead_to_memory():
    """And what is stored past 2^31, though no memory is that large."""
    from ptx import Virtual

    stored = {}
    y = Virtual(
        1 << 40,
        9,
        store=lambda at, raw: stored.update(
            {int(a[0]): r.tobytes() for a, r in zip(at, raw, strict=True)}
        ),
    )
    x = Buffer(np.arange(128, dtype=np.uint32).reshape(32, 4), 8)
    body = (
        "shl.b64 %rd6, %rd3, 30;\nadd.s64 %rd6, %rd6, %rd2;\nst.global.u32 [%rd6], %r3;"
    )
    ptx(body).launch("f", 1, 32, [x, y])
    assert stored == {8 * t << 30: (4 * t + 1).to_bytes(4, "little") for t in range(32)}
