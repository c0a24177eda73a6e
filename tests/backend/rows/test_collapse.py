"""Reads through reshapes: quotient and remainder of an index become it where elements lie together."""

from __future__ import annotations

import itertools
import operator
import random
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu.rows.collapse import collapse, split_blocks
from rlx.codegen.cpu.rows.ranges import LARGE, decided, in_units
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.kernel.compose import body_of, compose
from rlx.kernel.form import dense_strides
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import Scalar, axis, const
from rlx.ops.storage.packing import from_blocks
from rlx.reference.interpreter import evaluate

CASES: list[tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...], int]] = [
    ((1, 32, 6), (1, 32, 6), (1, 8, 24), 1),
    (("n", 32, 6), (3, 32, 6), ("n", 8, 24), 1),
    (("n", 4, 6, 5), (2, 4, 6, 5), ("n", 24, 5), 1),
    (("n", 24, 5), (2, 24, 5), ("n", 2, 3, 4, 5), 2),
    (("n", 6, 4, 5), (2, 6, 4, 5), ("n", 3, 40), 1),
    (("n", 6, 4), (2, 6, 4), ("n", 8, 3), 1),
]


def graph(shape: tuple[Any, ...], new: tuple[Any, ...], axis: int) -> Graph:
    g = Graph("reshaped")
    x = g.input("x", shape, "f32")
    y = ops.reshape(x * 2.0, (x.shape[0], *new[1:]))
    g.output("y", y - ops.sum(y, axis=(axis,), keepdims=True))
    return g


@pytest.mark.parametrize(("shape", "sizes", "new", "axis"), CASES)
def test_values(shape: Any, sizes: Any, new: Any, axis: int) -> None:
    g = graph(shape, new, axis)
    feed = {"x": np.random.default_rng(0).standard_normal(sizes).astype(np.float32)}
    for threads in (1, 2):
        got = rlx.compile(g, threads=threads).run(feed)["y"]
        np.testing.assert_allclose(got, evaluate(g, feed)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "sizes", "new", "axis"), CASES)
def test_all_loads_are_flat(shape: Any, sizes: Any, new: Any, axis: int) -> None:
    """No index is divided any more: every load is at an offset with a fixed step along each axis."""
    lir = plan(graph(shape, new, axis))
    for id in lir.plan.schedule:
        node = lir.mir.nodes[id]
        nest = compose(body_of(node))
        if isinstance(nest, Nest):
            flat = collapse(
                nest, [o.shape for o in node.operands], [dense_strides(o.shape) for o in node.operands]
            )
            prims = {e.prim for s in (*flat.stats, *flat.stores) for e in s.body.walk()}
            assert not prims & {"load", "floor_div", "mod"}


def test_conditions_that_extents_decide_vanish() -> None:
    """Pieces of pieces: what is known of an index is not asked again."""
    g = Graph("pieces")
    a, b = g.input("a", ("n", 20), "f32"), g.input("b", ("n", 20), "f32")
    inner = ops.concat([ops.concat([a, -b], axis=0), ops.concat([b, a * 2.0], axis=0)], axis=1)
    g.output("y", ops.reshape(ops.concat([inner, inner], axis=1), (2 * a.shape[0], 4, 20)) + 1.0)
    rng = np.random.default_rng(0)
    for n in (1, 3):
        feed = {k: rng.standard_normal((n, 20)).astype(np.float32) for k in "ab"}
        np.testing.assert_array_equal(rlx.compile(g).run(feed)["y"], evaluate(g, feed)["y"])


@pytest.mark.parametrize("last", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [5, 40, "n"])
def test_a_narrow_last_axis(last: int, rows: Any) -> None:
    """Lanes run along a wide axis; every element is stored where it belongs, and none beside it."""
    g = Graph("narrow")
    parts = [g.input(f"x{i}", (6, rows), "f32") for i in range(last)]
    turned = [
        ops.reshape(ops.transpose(x * (i + 1.0), (1, 0)), (x.shape[1], 6, 1)) for i, x in enumerate(parts)
    ]
    y = ops.concat(turned, axis=2) if last > 1 else turned[0]
    g.output("y", ops.where(y > 0.0, y, -y))
    rng = np.random.default_rng(0)
    for n in (1, 17, 40) if rows == "n" else (rows,):
        feed = {f"x{i}": rng.standard_normal((6, n)).astype(np.float32) for i in range(last)}
        want = evaluate(g, feed)["y"]
        for how in ({"threads": 1}, {"threads": 2}, {"debug": "poison"}):
            np.testing.assert_array_equal(rlx.compile(g, **how).run(feed)["y"], want)


def test_a_row_appended_to_a_cache_is_read_side_by_side() -> None:
    """One new token per head, cut from a projection: its place along the cached axis decides no index."""
    g = Graph("append")
    past, x = g.input("past", (1, 3, "n", 16), "f32"), g.input("x", (1, 1, 144), "f32")
    row = ops.transpose(ops.reshape(ops.slice_axis(x, 2, 48, 48), (1, 1, 3, 16)), (0, 2, 1, 3))
    g.output("y", ops.concat([past, row], axis=2))
    program = rlx.compile(g)
    (kernel,) = [compose(body_of(program.lir.mir.nodes[i])) for i in program.lir.plan.schedule]
    assert isinstance(kernel, Nest)
    assert not {"mod", "floor_div"} & {e.prim for e in decided(kernel.stores[0].body, kernel.space).walk()}
    rng = np.random.default_rng(0)
    feed = {"past": rng.standard_normal((1, 3, 5, 16)), "x": rng.standard_normal((1, 1, 144))}
    feed = {name: value.astype(np.float32) for name, value in feed.items()}
    new = feed["x"][0, 0, 48:96].reshape(1, 3, 1, 16)
    np.testing.assert_array_equal(program.run(feed)["y"], np.concatenate([feed["past"], new], axis=2))


@pytest.mark.parametrize(("channels", "size"), [(32, 9), (48, 16), (40, 5)])
@pytest.mark.parametrize("kind", ["u8", "f32", "bf16"])
def test_blocked_channels_are_moved_to_planes(channels: int, size: int, kind: str) -> None:
    """Channels that are read as block and lane are two axes: squares of pixels and lanes are turned."""
    g = Graph("planes")
    blocks = g.input("x", (2, -(-channels // 16), size, size, 16), kind)
    g.output("y", get_op("copy")(from_blocks(blocks, channels)))
    x = np.random.default_rng(3).integers(0, 99, blocks.shape).astype(blocks.dtype.np)
    for threads in (1, 2):
        got = rlx.compile(g, threads=threads).run({"x": x})["y"]
        np.testing.assert_array_equal(got, evaluate(g, {"x": x})["y"])
    if channels % 16 == 0:
        nest = compose(body_of(plan(g).mir.nodes[plan(g).plan.schedule[0]]))
        assert isinstance(nest, Nest)
        flat = collapse(split_blocks(nest), [blocks.shape], [dense_strides(blocks.shape)])
        assert {e.prim for e in flat.stores[0].body.walk()} & {"load", "floor_div", "mod"} == set()


INTEGERS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floor_div": operator.floordiv,
    "mod": operator.mod,
}


def value_at(s: Scalar, point: tuple[int, ...]) -> int:
    """An index at a point, in Python's integers."""
    if s.prim in ("axis", "const"):
        return point[s.data] if s.prim == "axis" else int(s.data)
    return INTEGERS[s.prim](*(value_at(a, point) for a in s.args))


def test_quotients_in_units_are_the_same_numbers() -> None:
    rng, changed = random.Random(5), 0
    for _ in range(400):
        space = tuple(rng.randint(1, 7) for _ in range(3))
        index = const(rng.randint(-9, 9))
        for number in range(3):
            index = index + axis(number) * rng.choice([0, 1, 1, -1, 2, 3, 4, 6, 8, 12, 24])
        by = rng.choice([2, 4, 6, 12, 24, 48])
        for body in (index // by, index % by):
            found = in_units(body, space)
            changed += found != body
            for point in itertools.product(*map(range, space)):
                assert value_at(found, point) == value_at(body, point), (body, space, point)
    assert changed > 100


@pytest.mark.parametrize(("step", "by"), [(4, 0), (4, -8), (LARGE, 2 * LARGE)])
def test_quotients_that_stay(step: int, by: int) -> None:
    """By zero they have a result of their own, and a product of large numbers may overflow."""
    for body in (axis(0) * step // by, axis(0) * step % by):
        assert in_units(body, (64, 4)) == body
