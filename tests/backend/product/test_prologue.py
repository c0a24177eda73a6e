"""Products and convolutions that compute what they read: against the reference, and to the bit what two
kernels give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import assert_f32_targets_stand_for_all, code_of, every_f32_target, every_target
from rlx import Graph, ops
from rlx.ir.dtype import dtype as as_dtype
from rlx.ir.graph import Node
from rlx.kernel.compose import compose
from rlx.kernel.nests import ContractNest, ConvNest
from rlx.ops.math.contract import dot_general
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve

Made = Callable[[Node, Node, Node], Node]

# How (activations [M, K], one number per k, one number per row) become the left operand.
PROLOGUES: dict[str, Made] = {
    "activation": lambda x, k, m: ops.silu(x),
    "scale by k": lambda x, k, m: x * k,
    "scale by row": lambda x, k, m: x * ops.sigmoid(m),
    "both": lambda x, k, m: ops.maximum(x * m + k, 0.0),
    "residual": lambda x, k, m: ops.tanh(x + x * k) - m,
}
ROWS = (1, 2, 3, 13, 15, 29, 128, 131)


def prologues(prog: Any) -> list[ContractNest | ConvNest]:
    """Kernels of a program that compute an operand."""
    kernels = [compose(n.bodies[0]) for n in prog.lir.mir.nodes if n.bodies and n.op.name == "region"]
    return [k for k in kernels if isinstance(k, (ContractNest, ConvNest)) and k.has_prologue]


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(prologue: Made, rows: Any, k: int, n: int, end: Callable[[Node], Node] | None = None) -> Graph:
    """prologue(x) @ w, with weights in panels."""
    g = Graph()
    x, m = g.input("x", (rows, k), "f32"), g.input("m", (rows, 1), "f32")
    along = g.param("k", (k,), "f32", values((k,), 1))
    w = g.param("w", (k, n), "f32", values((k, n), 2))
    y = ops.matmul(prologue(x, along, m), w)
    g.set_outputs({"y": y if end is None else end(y)})
    return g


def feed(rows: int, k: int) -> dict[str, np.ndarray]:
    return {"x": values((rows, k), 3), "m": values((rows, 1), 4)}


def apart(graph: Graph, target: str = "host", **options: Any) -> dict[tuple[int, int], bool]:
    """Pins that keep every contraction or convolution from the ops that make its left operand."""
    prog = rlx.compile(graph, target=target, **options)
    found: dict[tuple[int, int], bool] = {}
    for d in prog.decisions:
        if d.rule == "prologue" and d.verdict:
            heavy = [i for i in d.region if prog.lir.unfused.nodes[i].op.name in ("dot_general", "conv")]
            found |= {(i, j): False for j in heavy for i in d.region if i not in heavy and i < j}
    assert found
    return found


def check_bits(graph: Graph, data: dict[str, np.ndarray], target: str = "host") -> np.ndarray:
    """One output that two kernels and any number of threads give too."""
    progs = [rlx.compile(graph, target=target, threads=t) for t in (1, 2, 3)]
    assert prologues(progs[0])
    progs.append(rlx.compile(graph, target=target, threads=2, pins=apart(graph, target)))
    assert not prologues(progs[-1])
    first, *others = (p.run(data)["y"] for p in progs)
    assert all(first.tobytes() == other.tobytes() for other in others)
    return first


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.sqrt(want.size + 1))


SHAPES = [(1, 33), (7, 50), (48, 64), (129, 401), (70, 5)]


@every_f32_target
@pytest.mark.parametrize(("name", "k", "n"), [(p, *s) for p, s in zip(PROLOGUES, SHAPES, strict=True)])
def test_every_row_count_from_one_object(target: Target, name: str, k: int, n: int) -> None:
    """Symbolic M, odd sizes, one object; the same bits for any thread count and without fusion."""
    graph = product(PROLOGUES[name], "rows", k, n)
    progs = [rlx.compile(graph, target=target.name, threads=t) for t in (1, 2, 3)]
    assert len(prologues(progs[0])) == 1
    separate = rlx.compile(graph, target=target.name, threads=2, pins=apart(graph, target.name))
    assert not prologues(separate)
    for rows in ROWS:
        data = feed(rows, k)
        want = evaluate(graph, data)["y"]
        one, *more = (p.run(data)["y"] for p in progs)
        close(one, want)
        for other in (*more, separate.run(data)["y"]):
            assert one.tobytes() == other.tobytes(), rows


def test_no_rows_and_no_depth() -> None:
    graph = product(PROLOGUES["both"], "rows", 8, 24)
    prog = rlx.compile(graph)
    assert prologues(prog)
    assert prog.run(feed(0, 8))["y"].shape == (0, 24)
    g = Graph()
    x, w = g.input("x", ("rows", "depth"), "f32"), g.input("w", ("depth", 24), "f32")
    g.set_outputs({"y": ops.matmul(ops.exp(x), w)})
    empty = {"x": np.zeros((3, 0), np.float32), "w": np.zeros((0, 24), np.float32)}
    np.testing.assert_array_equal(rlx.compile(g).run(empty)["y"], np.zeros((3, 24), np.float32))


def test_special_values_pass_through() -> None:
    graph = product(PROLOGUES["both"], 5, 33, 40)
    data = feed(5, 33)
    data["x"][1, 4], data["x"][2, 32] = np.nan, np.inf
    got, want = check_bits(graph, data), evaluate(graph, data)["y"]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[1]).all() and not np.isnan(got[0]).any()


@pytest.mark.parametrize("rows", [1, 2, 37])
def test_right_operands_that_are_not_weights(rows: int) -> None:
    """B is read where it lies, or packed by the kernel; depth comes in blocks where it is large."""
    for depth, columns in ((40, 70), (1100, 33), (19, 3)):
        g = Graph()
        x, w = g.input("x", (rows, depth), "f32"), g.input("w", (depth, columns), "f32")
        s = g.input("s", (depth,), "f32")
        g.set_outputs({"y": ops.matmul(x * s, w)})
        data = {"x": values((rows, depth)), "w": values((depth, columns), 1), "s": values((depth,), 2)}
        pins = {(2, 3): True} if g.nodes[3].op.name == "mul" else {}
        got = rlx.compile(g, pins=pins).run(data)["y"]
        close(got, evaluate(g, data)["y"])


def test_batches_and_columns_stored_by_rows() -> None:
    g = Graph()
    x, y = g.input("x", (3, 2, "rows", 24), "f32"), g.input("y", (3, 2, 40, 24), "f32")
    scale = g.input("s", (2, 1, 1), "f32")
    g.set_outputs({"y": ops.matmul(x * scale, ops.transpose(y, (0, 1, 3, 2))) + 1.0})
    for rows in (1, 2, 5, 150):
        data = {"x": values((3, 2, rows, 24)), "y": values((3, 2, 40, 24), 1), "s": values((2, 1, 1), 2)}
        close(check_bits(g, data), evaluate(g, data)["y"])


def test_rows_seen_through_a_reshape() -> None:
    g = Graph()
    x = g.input("x", ("batch", "seq", 48), "f32")
    w = g.param("w", (48, 64), "f32", values((48, 64), 1))
    s = g.input("s", ("batch", 1, 48), "f32")
    rows = ops.reshape(ops.silu(x * s), (x.shape[0] * x.shape[1], 48))
    g.set_outputs({"y": ops.gelu(ops.matmul(rows, w))})
    data = {"x": values((3, 7, 48)), "s": values((3, 1, 48), 2)}
    close(check_bits(g, data), evaluate(g, data)["y"])


@every_target
@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_other_floats(target: Target, dtype: str) -> None:
    """The prologue is rounded to the operand's dtype, as if it had been stored."""
    np_dtype = as_dtype(dtype).np
    g = Graph()
    x, s = g.input("x", ("rows", 33), dtype), g.input("s", (33,), dtype)
    w = g.param("w", (33, 50), dtype, values((33, 50), 1).astype(np_dtype))
    wide = "f64" if dtype == "f64" else "f32"
    y = dot_general(ops.maximum(x * s, 0.0), w, ((1,), (0,)), out_dtype=as_dtype(wide))
    g.set_outputs({"y": y})
    for rows in (1, 6, 31):
        data = {"x": values((rows, 33)).astype(np_dtype), "s": values((33,), 2).astype(np_dtype)}
        got, want = check_bits(g, data, target.name), evaluate(g, data)["y"]
        error = 1e-12 if dtype == "f64" else 0.05
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=error, atol=error)


def test_numbers_that_are_cast_and_dequantised() -> None:
    g = Graph()
    codes = g.input("codes", ("rows", 40), "u8")
    w = g.param("w", (40, 48), "f32", values((40, 48), 1))
    g.set_outputs({"y": ops.matmul((ops.cast(codes, "f32") - 128.0) * 0.02, w)})
    for rows in (1, 30):
        data = {"codes": np.random.default_rng(rows).integers(0, 256, (rows, 40)).astype(np.uint8)}
        close(check_bits(g, data), evaluate(g, data)["y"])


# ---- convolutions


def gated(
    size: tuple[Any, int, Any, Any], out: int, window: int, padding: int, stride: int, groups: int = 1
) -> Graph:
    """A convolution of an image that is scaled by a number per channel found from all of its pixels."""
    g, channels = Graph(), size[1]
    x = g.input("x", size, "f32")
    first = g.param(
        "first", (channels, channels, 1, 1), "f32", values((channels, channels, 1, 1), 1) / channels
    )
    w = values((out, channels // groups, window, window), 2)
    image = ops.maximum(ops.conv(x, first), 0.0)
    gate = ops.sigmoid(ops.sum(image, (2, 3), keepdims=True) * 0.01)
    edges = ((padding, padding),) * 2
    y = ops.conv(
        image * gate, g.param("w", w.shape, "f32", w), strides=(stride,) * 2, padding=edges, groups=groups
    )
    g.set_outputs({"y": ops.maximum(y, 0.0)})
    return g


@every_f32_target
@pytest.mark.parametrize(
    "case",
    [
        (("n", 32, "h", "w"), 48, 1, 0, 1),
        (("n", 40, "h", "w"), 24, 1, 0, 2),
        (("n", 32, "h", "w"), 64, 5, 2, 1),
        (("n", 64, "h", "w"), 64, 1, 0, 1, 2),
    ],
    ids=["pixels", "every other pixel", "windows", "groups"],
)
def test_images_in_blocks(target: Target, case: Any) -> None:
    graph, small = gated(*case), {"h": 16, "w": 16}  # of fewer, a map computes the scale of every pixel again
    progs = [rlx.compile(graph, target=target.name, threads=t, assume=small) for t in (1, 2)]
    pins = apart(graph, target.name, assume=small)
    separate = rlx.compile(graph, target=target.name, assume=small, pins=pins)
    assert any(isinstance(k, ConvNest) for k in prologues(progs[0]))
    for size in ((1, 7, 7), (2, 13, 15), (1, 1, 40)):
        data = {"x": values((size[0], case[0][1], *size[1:]), 5)}
        one, two, other = (p.run(data)["y"] for p in (*progs, separate))
        close(one, evaluate(graph, data)["y"])
        assert one.tobytes() == two.tobytes() == other.tobytes(), size


def test_code_of_f32_needs_no_instructions_for_narrow_types() -> None:
    made = [product(PROLOGUES["residual"], "rows", 70, 33), gated(("n", 32, "h", "w"), 48, 1, 0, 1)]
    for graph in made:
        assert_f32_targets_stand_for_all(functools.partial(code_of, graph))


@every_f32_target
def test_planar_images_with_padding(target: Target) -> None:
    """Padding is around what the prologue gives: exp of it would be 1."""
    for stride, spatial in ((2, (13, 15)), (1, (6, 33))):
        g = Graph()
        x, s = g.input("x", (2, 6, *spatial), "f32"), g.input("s", (2, 6, 1, 1), "f32")
        w = g.param("w", (24, 6, 5, 5), "f32", values((24, 6, 5, 5), 1))
        y = ops.conv(ops.exp(x * s), w, strides=(stride, stride), padding=((2, 2), (2, 2)))
        g.set_outputs({"y": y})
        data = {"x": values((2, 6, *spatial), 2), "s": values((2, 6, 1, 1), 3)}
        close(check_bits(g, data, target.name), evaluate(g, data)["y"])


# ---- decisions


def decision(prog: Any) -> Any:
    (found,) = [d for d in prog.decisions if d.rule == "prologue"]
    return found


def test_refusals_are_recorded_with_their_reasons() -> None:
    def refused(build: Callable[[Graph], Node]) -> str:
        g = Graph()
        g.set_outputs({"y": build(g)})
        found = decision(rlx.compile(g))
        assert not found.verdict
        assert found.reason in rlx.compile(g).why_not(found.region[0], found.region[-1])
        return str(found.reason)

    def across(g: Graph) -> Node:
        w = g.param("w", (64, 48), "f32", values((64, 48)))
        return ops.matmul(ops.transpose(ops.exp(g.input("x", (64, 30), "f32")), (1, 0)), w)

    assert "side by side" in refused(across)

    def twice(g: Graph) -> Node:
        x = ops.exp(g.input("x", (40, 40), "f32"))
        return ops.matmul(x, x)

    assert "from memory" in refused(twice)

    def winograd(g: Graph) -> Node:
        w = values((32, 32, 3, 3))
        x = ops.exp(g.input("x", (1, 32, 28, 28), "f32"))
        return ops.conv(x, g.param("w", w.shape, "f32", w), padding=((1, 1), (1, 1)))

    assert "Winograd" in refused(winograd)


def test_what_is_computed_again_is_billed() -> None:
    """Few rows are computed by every thread, many by one; columns that are not in panels in groups."""

    def computed(rows: int, columns: int, weights: bool) -> int:
        g = Graph()
        x = g.input("x", (rows, 256), "f32")
        shape = (256, columns)
        w = g.param("w", shape, "f32", values(shape)) if weights else g.input("w", shape, "f32")
        g.set_outputs({"y": ops.matmul(x * 2.0, w)})
        added = decision(rlx.compile(g)).compute_ps_added
        return 1000 * int(added) // (rows * 256)

    multiplication = resolve("host").again.operation_fs
    assert computed(512, 640, weights=True) == 0
    assert computed(16, 640, weights=True) == multiplication  # one more per element
    assert computed(512, 640, weights=False) == 2 * multiplication  # three groups of columns


def test_large_images_that_could_be_read_in_place_are_not_computed() -> None:
    for pixels, verdict in ((14, True), (112, False)):
        found = decision(rlx.compile(gated((1, 96, pixels, pixels), 32, 1, 0, 1)))
        assert found.verdict is verdict
    assert "loses time" in found.reason


def test_an_epilogue_comes_before_a_prologue() -> None:
    g = Graph()
    x = g.input("x", (64, 32), "f32")
    up, down = (g.param(n, s, "f32", values(s)) for n, s in (("up", (32, 96)), ("down", (96, 32))))
    g.set_outputs({"y": ops.matmul(ops.gelu(ops.matmul(x, up)), down)})
    prog = rlx.compile(g)
    assert not prologues(prog) and [d.rule for d in prog.decisions.kept()] == ["epilogue"]


def test_pins_decide() -> None:
    graph = product(PROLOGUES["activation"], 16, 32, 48)
    assert decision(rlx.compile(graph)).verdict
    apart_, together = apart(graph), dict.fromkeys(apart(graph), True)
    assert decision(rlx.compile(graph, pins=apart_)).reason == "pinned apart by the user"
    assert decision(rlx.compile(graph, pins=together)).pinned


def test_the_plan_reads_back(tmp_path: Any) -> None:
    prog = rlx.compile(product(PROLOGUES["both"], "rows", 24, 48))
    prog.save(tmp_path / "prologue.rlx")
    again = rlx.load(tmp_path / "prologue.rlx")
    data = feed(9, 24)
    assert again.run(data)["y"].tobytes() == prog.run(data)["y"].tobytes()
    assert again.lir.fingerprint() == prog.lir.fingerprint()
    other = rlx.compile(product(PROLOGUES["scale by k"], "rows", 24, 48))
    assert other.lir.fingerprint() != prog.lir.fingerprint()
