# SPDX-License-Identifier: Apache-2.0
"""Compiled HLO is read right: text that was kept, and text of the jax at hand."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_layout.explain import hlo

TEXTS = Path(__file__).with_name("hlo_text")
CPU_SCAN = (TEXTS / "cpu_scan.txt").read_text()
H100 = (TEXTS / "h100_calls.txt").read_text()


def instruction(module: hlo.Module, name: str) -> tuple[str, hlo.Instruction]:
    for computation, names in module.names.items():
        if name in names:
            return computation, names[name]
    raise KeyError(name)


def cost(module: hlo.Module, name: str) -> tuple[int, int]:
    place = instruction(module, name)
    return hlo.traffic(module, *place), hlo.flops(module, *place)


def test_a_line_is_taken_apart():
    module = hlo.parse(CPU_SCAN)
    assert (module.name, module.entry) == ("jit_scan", "main.3")
    computation, i = instruction(module, "tuple.3")
    assert computation == "region_0.1" and i.root and i.opcode == "tuple"
    assert i.operands == ("get-tuple-element.4", "copy.5")
    assert [str(s) for s in i.shapes] == ["s32[]", "f32[4,8]"]
    assert i.shapes[1].bytes == 4 * 8 * 4 and i.shapes[0].bytes == 4
    _, transpose = instruction(module, "transpose.1")
    assert transpose.shapes[0].order == (1, 0)
    assert transpose.integers("dimensions") == (1, 0)
    assert transpose.op_name == "jit(scan)/while/body/transpose"


def test_trips_of_a_loop_inside_of_a_call():
    module = hlo.parse(CPU_SCAN)
    assert module.trips == {
        "main.3": (1, True, False),
        "while.5_computation": (1, True, False),
        "region_0.1": (7, True, True),
        "region_1.2": (7, True, True),
    }
    unknown = hlo.parse(CPU_SCAN.replace('"known_trip_count":{"n":"7"}', ""))
    assert unknown.trips["region_0.1"] == (1, False, True)


def test_frames_are_the_innermost_first():
    module = hlo.parse(CPU_SCAN)
    _, i = instruction(module, "transpose.1")
    assert list(module.frames(i)) == [
        ("/home/user/model.py", 16, "step.<locals>.body"),
        ("/home/user/run.py", 30, "<module>"),
    ]
    _, other = instruction(module, "copy.5")
    assert list(module.frames(other)) == []


def test_a_line_written_out_in_the_metadata():
    text = CPU_SCAN.replace(
        "stack_frame_id=2", 'source_file="/a b/c.py" source_line=12'
    )
    module = hlo.parse(text)
    (frame,) = module.frames(instruction(module, "transpose.1")[1])
    assert frame[:2] == ("/a b/c.py", 12)


def test_what_moves():
    module = hlo.parse(CPU_SCAN)
    inside = module.names["fused_computation"]
    # The transpose names its operand's memory anew, the copy re-orders it.
    assert not hlo.moves(inside["transpose.1"], inside["param_0"].shapes[0])
    assert hlo.moves(inside["copy.1"], inside["transpose.1"].shapes[0])
    body = module.names["region_0.1"]
    assert not hlo.moves(body["copy.5"], body["get-tuple-element.5"].shapes[0])


def test_axes_of_extent_one_do_not_move():
    text = CPU_SCAN.replace("f32[4,8]", "f32[1,8]").replace("f32[8,4]", "f32[8,1]")
    inside = hlo.parse(text).names["fused_computation"]
    assert not hlo.moves(inside["copy.1"], inside["transpose.1"].shapes[0])


def test_bytes_and_flops():
    module = hlo.parse(CPU_SCAN)
    assert cost(module, "transpose_copy_fusion") == (2 * 4 * 8 * 4, 0)
    assert cost(module, "dot_general.0") == ((4 * 8 + 8 * 4 + 4 * 4) * 4, 2 * 4 * 4 * 8)
    assert cost(module, "while.0") == cost(module, "tuple.3") == (0, 0)


def test_library_calls():
    module = hlo.parse(H100)
    product = 2 * 512 * 320 * 256
    moved = 2 * (512 * 256 + 256 * 320 + 320 + 512 * 320)
    assert cost(module, "cublas-lt-matmul.2") == (moved, product)
    assert cost(module, "linear.3") == (moved, product)  # without its scratch memory
    _, flops = cost(module, "cudnn-conv.1")
    assert flops == 2 * (4 * 28 * 28 * 32) * (3 * 3 * 16)
    _, lt = instruction(module, "cublas-lt-matmul.2")
    assert lt.config["gemm_backend_config"]["epilogue"] == "BIAS_RELU"
    assert instruction(module, "w.1")[1].op_name == "params['w']"


def test_attributes_of_an_ffi_call():
    _, i = instruction(hlo.parse(H100), "linear.3")
    assert i.attribute("custom_call_target") == "jax_layout_gemm"
    assert i.config == {
        "a_shape": [512, 256],
        "activation": "gelu",
        "alpha": [1.5, 0.0],
        "aux": False,
        "b_shape": [256, 320],
        "beta": [0.0, 0.0],
        "bias": True,
        "derivative": "none",
        "operand_type": "bfloat16",
        "result_type": "bfloat16",
        "scales": 0,
        "spec": "ak,kn->an",
        "sums": False,
        "tf32": True,
        "workspace": True,
    }


def test_slices_count_as_what_they_read():
    def f(x):
        return jax.lax.scan(lambda c, row: (c + row, row * 2), x[0], x)

    module = hlo.parse(compiled(f, (64, 1024)).as_text())
    total = sum(
        trips.times * hlo.traffic(module, computation, i)
        for computation, trips in module.trips.items()
        for i in module.computations[computation]
    )
    # Each of 64 rows: read and written a few times, never the whole of x.
    assert 4 * 64 * 4096 <= total <= 12 * 64 * 4096


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="must hold an ENTRY computation"):
        hlo.parse("HloModule empty\n")


def compiled(f, *shapes, dtype=jnp.float32):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).compile()


PROGRAMS = {
    "transpose": (lambda x: jnp.transpose(x, (0, 2, 3, 1)), (8, 3, 64, 64)),
    "sum": (lambda x: jnp.sin(x).sum(1), (8, 3, 64, 64)),
    "dot": (lambda a, b: a @ b, (256, 128), (128, 64)),
    "einsum": (
        lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k),
        (2, 64, 4, 32),
        (2, 64, 4, 32),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_and_flops_of_the_jax_at_hand_are_xlas(name):
    f, *shapes = PROGRAMS[name]
    program = compiled(f, *shapes)
    module = hlo.parse(program.as_text())
    (body,) = (module.computations[c] for c in module.trips)
    analysis = program.cost_analysis()
    ours = sum(hlo.traffic(module, module.entry, i) for i in body)
    assert ours == analysis["bytes accessed"]
    if name in ("dot", "einsum"):
        assert sum(hlo.flops(module, module.entry, i) for i in body) == pytest.approx(
            analysis["flops"], rel=0.01
        )


def test_lines_and_loops_of_the_jax_at_hand():
    def body(carry, _):
        return jnp.tanh(carry.T) + 1, None

    def f(x):
        return jax.lax.scan(body, x, None, length=5)[0]

    module = hlo.parse(compiled(f, (128, 128)).as_text())
    line = inspect.getsourcelines(body)[1] + 1
    loops = [c for c, trips in module.trips.items() if trips == (5, True, True)]
    frames = [
        (frame.file, frame.line)
        for c in loops
        for i in module.computations[c]
        for part in (i, *module.fused(i))
        if part.opcode == "tanh"
        for frame in module.frames(part)
    ]
    assert frames[0] == (__file__, line)


def test_every_line_of_the_jax_at_hand_is_read():
    def f(x, w):
        return jax.grad(lambda w: jnp.sum(jax.nn.gelu(x @ w) ** 2))(w)

    text = compiled(f, (64, 32), (32, 16)).as_text()
    module = hlo.parse(text)
    lines = re.findall(r"^ +(?:ROOT )?%([^\s=]+) = ", text, re.MULTILINE)
    assert [i.name for body in module.computations.values() for i in body] == lines
    for name, body in module.computations.items():
        known = {i.name for i in body}
        assert all(o in known for i in body for o in i.operands), name
