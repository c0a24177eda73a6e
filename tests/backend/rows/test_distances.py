"""Exponentials of distances from the largest element of a row, and what rows cost per vector."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import rlx
from machines import executable, on_targets
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.rows.distances import use_distances
from rlx.codegen.native import jit
from rlx.ir.dtype import F16, F32
from rlx.ir.graph import Graph, Node
from rlx.kernel.nests import Nest, Stat, Store
from rlx.kernel.scalar import Scalar, axes, call, const, convert, load
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve, targets

RUN = executable("x86-64-v4", "x86-64-v3", "x86-64")
X = load(0, axes(2), F32)
LARGEST, TOTAL = (Scalar("acc", (), F32, number) for number in (0, 1))
POWER = call("exp_difference", X, LARGEST)


def nest(stored: Scalar, total: Scalar = POWER, full: bool = True) -> Nest:
    stats = (Stat("max", X, F32), Stat("sum", total, F32))
    return Nest((8, 64), 1, stats, (Store(stored, full, (64, 1) if full else (1,)),))


def changed(made: Nest) -> tuple[str, list[str]]:
    """How the first statistic combines, and all exponentials."""
    bodies = [*(s.body for s in made.stats), *(s.body for s in made.stores)]
    return made.stats[0].combine, [e.prim for b in bodies for e in b.walk() if e.prim.startswith("exp")]


def test_a_softmax_takes_distances() -> None:
    stored = call("mul", POWER, call("div", const(1.0, F32), TOTAL))
    assert changed(use_distances(nest(stored))) == ("largest", ["exp_below"] * 2)
    logarithm = call("sub", call("sub", X, LARGEST), call("log", TOTAL))
    assert changed(use_distances(nest(logarithm))) == ("largest", ["exp_below"])
    row = call("add", LARGEST, call("log", TOTAL))
    assert changed(use_distances(nest(row, full=False))) == ("largest", ["exp_below"])
    half = convert(stored, F16)
    assert changed(use_distances(nest(half)))[1] == ["exp_below"] * 2


@pytest.mark.parametrize(
    "stored",
    [
        POWER,  # the sum does not reach it
        call("where", call("greater", TOTAL, const(1.0, F32)), LARGEST, X),  # a comparison with NaN
        call("maximum", call("mul", POWER, TOTAL), LARGEST),
    ],
)
def test_a_maximum_that_must_show_nan_does(stored: Scalar) -> None:
    combine, found = changed(use_distances(nest(stored)))
    assert combine == "max" and set(found) == {"exp_below"}


def test_other_differences_may_be_positive() -> None:
    other = call("exp_difference", load(1, axes(2), F32), LARGEST)
    made = nest(call("mul", other, TOTAL), total=other)
    assert use_distances(made) == made
    swapped = call("exp_difference", LARGEST, X)
    made = nest(call("mul", swapped, TOTAL), total=swapped)
    assert use_distances(made) == made


def rows(body: str) -> Graph:
    g = Graph("rows")
    x = g.input("x", ("n", 77), "f32")
    made: dict[str, Node] = {
        "softmax": ops.softmax(x, axis=-1),
        "log_softmax": ops.log_softmax(x, axis=-1),
        "logsumexp": ops.logsumexp(x, axis=-1),
        "columns": ops.softmax(x, axis=0),
        "powers": ops.exp(x - ops.max(x, axis=-1, keepdims=True)),
    }
    g.output("y", made[body])
    return g


@on_targets(RUN)
@pytest.mark.parametrize("body", ["softmax", "log_softmax", "logsumexp", "columns", "powers"])
def test_rows_with_what_is_not_finite(target: Target, body: str) -> None:
    """NaN anywhere in a row, infinities, distances whose exponentials are denormal or 0."""
    x = np.random.default_rng(3).standard_normal((40, 77), dtype=np.float32)
    x[0, 0] = x[1, 76] = x[2, 40] = np.nan
    x[3, 3], x[4, 5] = np.inf, -np.inf
    x[5] = np.nan
    x[6] = -np.inf
    x[7, 1:] = -np.inf
    x[8, ::2], x[8, 5] = np.nan, np.inf
    x[9] = np.linspace(-110, 0, 77)
    x[10] = np.linspace(-3e38, 0, 77)
    x[11, 1:] -= 1e9
    if body == "columns":
        x = np.ascontiguousarray(np.resize(x.T, (77, 77)))
    g = rows(body)
    with np.errstate(all="ignore"):
        want = evaluate(g, {"x": x})["y"]
    found = rlx.compile(g, target=target.name, cache=False).run({"x": x})["y"]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    # an exponential 100 below the largest has an argument that is off by 4 millionths
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=2**-148)


ARITHMETIC = re.compile(r"\tv(?!mov|broadcast|prefetch|zero)\w+\t")
# Instructions per vector that compute, of rows larger than the caches.
MOST = {"x86-64-v3": {"softmax": 16, "chain": 17}, "x86-64-v4": {"softmax": 14, "chain": 15}}


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("body", ["softmax", "chain"])
def test_instructions_per_vector(name: str, body: str) -> None:
    g = Graph("rows")
    x, s, b = g.input("x", (4096, 4096), "f32"), g.input("s", (4096,), "f32"), g.input("b", (4096,), "f32")
    g.output("y", ops.softmax(x) if body == "softmax" else ops.silu(x * s + b))
    target = resolve(name)
    texts = build_kernels(plan(g, target=name), target).texts
    blocks = [b.split("\tjl\t")[0] for text in texts for b in jit.assembly(text, target).split("\n.L")]
    loops = [block for block in blocks if "vmovntps" in block and ARITHMETIC.search(block)]
    counts = [len(ARITHMETIC.findall(block)) / block.count("vmovntps") for block in loops]
    assert max(counts) == MOST[name][body], counts


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "aarch64", "wasm32"])
@pytest.mark.parametrize("shape", [(4096, 4096), (64, 384), ("n",)])
def test_chains_run_side_by_side(name: str, shape: tuple[int | str, ...]) -> None:
    """Four vectors of tanh are computed at once, but not in WebAssembly, where the size of code counts."""
    target = resolve(name)

    def widest(op: Callable[[Node], Node]) -> int:
        g = Graph("map")
        g.output("y", op(g.input("x", shape, "f32")))
        text = "".join(build_kernels(plan(g, target=name), target).texts)
        return max(map(int, re.findall(r"= load <(\d+) x float>", text))) // target.lanes("f32")

    others = 1 if shape == (64, 384) else 2  # two where an output may be larger than the caches
    assert widest(ops.tanh) == (others if name == "wasm32" else 4)
    assert widest(lambda x: x * 2.0) == widest(lambda x: ops.sigmoid(x) * ops.tanh(x)) == others


@on_targets(RUN)
@pytest.mark.parametrize("columns", [1, 7, 31, 32, 64, 65, 100, 131])
def test_bits_do_not_depend_on_how_many_run_side_by_side(target: Target, columns: int) -> None:
    """A row of any length gives the bits that each of its elements has alone."""
    x = np.random.default_rng(columns).standard_normal((5, columns), dtype=np.float32) * 4
    for op in (ops.tanh, ops.silu, ops.gelu):
        g = Graph("map")
        g.output("y", op(g.input("x", ("n", "m"), "f32")))
        program = rlx.compile(g, target=target.name, cache=False)
        found = program.run({"x": x})["y"]
        alone = np.array([[program.run({"x": v.reshape(1, 1)})["y"][0, 0] for v in row] for row in x])
        np.testing.assert_array_equal(found, alone)


def test_bits_of_a_sigmoid_do_not_depend_on_the_machine() -> None:
    """The division is exact; no approximation of an inverse differs from vendor to vendor."""
    g = Graph("rows")
    g.output("y", ops.silu(g.input("x", (64, 64), "f32")))
    for target in targets():
        if target.x86:
            texts = build_kernels(plan(g, target=target.name), target).texts
            assert not any("rcp" in jit.assembly(text, target) for text in texts), target.name
