"""Products of bytes: rows that are widened once, small weights in panels of quads, larger ones that wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from exact_integers import WEIGHTS, left, product, weights
from gemm_harness import TARGETS, Guarded, every_target
from rlx.errors import InputError
from rlx.kernel.quads import QuadPanels, room_for
from rlx.rewrite.weight_layout import small_quads
from rlx.target.cpu import Target
from rlx.target.tiles import PanelTile


def program(
    target: Target, dtype: str, w: np.ndarray, m: Any = "m", threads: int = 1, by_columns: bool = False
) -> rlx.CompiledProgram:
    g = rlx.Graph("bytes")
    stored = w.T.copy() if by_columns else w
    x, right = g.input("x", (m, w.shape[0]), dtype), g.param("w", stored.shape, "i8", stored)
    g.output("y", rlx.ops.dot_general(x, right, ((1,), (int(by_columns),)), out_dtype="i32"))
    return rlx.compile(g, target=target.name, threads=threads)


def uses_quads(made: rlx.CompiledProgram) -> bool:
    return any(n.op.name == "unpack_quads" for r in made.graph.nodes for b in r.bodies for n in b.nodes)


@every_target
@pytest.mark.parametrize("dtype", ["u8", "i8"])
@pytest.mark.parametrize("how", WEIGHTS)
def test_random_sizes(target: Target, dtype: str, how: str) -> None:
    """Odd k, ragged columns, one row, rows of one and two tiles; extreme values are frequent."""
    rng = np.random.default_rng(len(how))
    sizes = [(1, 1), (5, 17), (7, 8), (33, 50), (383, 131), *rng.integers(1, 90, (2, 2)).tolist()]
    for k, n in sizes:
        w = weights(rng, how, k, n)
        made = program(target, dtype, w)
        for m in (0, 1, 2, 3, 6, 7, int(rng.integers(8, 40))):
            x = left(rng, dtype, m, k)
            np.testing.assert_array_equal(made.run({"x": x})["y"], product(x, w))


@every_target
@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_threads_and_many_panels(target: Target, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for how, m in (("outliers", 1), ("outliers", 2), ("small", 2), ("outliers", 45), ("large", 45)):
        w = weights(rng, how, 130, 333)
        x = left(rng, dtype, m, 130)
        for threads in (1, 2):
            found = program(target, dtype, w, m, threads).run({"x": x})["y"]
            np.testing.assert_array_equal(found, product(x, w))


@every_target
@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_rows_that_are_computed(target: Target, dtype: str) -> None:
    """What quantises the left operand runs inside of the product, which then widens what it computed."""
    rng = np.random.default_rng(5)
    low, high = (0, 255) if dtype == "u8" else (-128, 127)
    for how, (m, k, n) in (("small", (9, 37, 50)), ("outliers", (1, 130, 64)), ("large", (40, 63, 33))):
        w = weights(rng, how, k, n)
        x = rng.integers(low, high, (m, k), endpoint=True).astype(np.float32)
        g = rlx.Graph("computed")
        levels = rlx.ops.cast(rlx.ops.clip(g.input("x", ("m", k), "f32") * 2.0, low, high), dtype)
        g.output(
            "y", rlx.ops.dot_general(levels, g.param("w", w.shape, "i8", w), ((1,), (0,)), out_dtype="i32")
        )
        found = rlx.compile(g, target=target.name).run({"x": x})["y"]
        np.testing.assert_array_equal(found, product(np.clip(x * 2, low, high), w))


@every_target
def test_rows_at_the_end_of_memory(target: Target) -> None:
    """No byte past the last row is read, also by steps that wait."""
    rng, guard = np.random.default_rng(6), Guarded()
    for k in (4, 5, 6, 7, 33, 66, 131):
        w = weights(rng, "outliers", k, 40)
        made = program(target, "u8", w)
        for m in (1, 2, 7):
            x = left(rng, "u8", m, k)
            for at_end in (True, False):
                found = made.run({"x": guard.copy(x, at_end)})["y"]
                np.testing.assert_array_equal(found, product(x, w))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_values_decide(target: Target) -> None:
    """Weights lie in quads where few pairs are too large, on targets that multiply them faster."""
    rng = np.random.default_rng(7)
    for how in WEIGHTS:
        w = weights(rng, how, 384, 48)
        for by_columns in (False, True):
            made = program(target, "u8", w, by_columns=by_columns)
            assert uses_quads(made) == (target.small_bytes == "pairs" and how in ("small", "outliers"))


@every_target
@pytest.mark.parametrize("how", ["small", "outliers", "large"])
def test_values_of_weights_decide_in_loops_too(target: Target, how: str) -> None:
    """A loop multiplies by the same bytes in every step: they lie in panels of quads as elsewhere."""
    rng = np.random.default_rng(12)
    g, w = rlx.Graph("loop"), weights(rng, how, 40, 40)
    right = g.param("w", (40, 40), "i8", w)
    rows = g.input("x", (5, 3, 40), "u8")

    def step(total: rlx.Node, row: rlx.Node) -> tuple[rlx.Node, rlx.Node]:
        codes = rlx.ops.bitwise_xor(row, rlx.ops.cast(rlx.ops.bitwise_and(total, 255), "u8"))
        made = rlx.ops.dot_general(codes, right, ((1,), (0,)), out_dtype="i32")
        return made, made

    _, y = rlx.ops.scan(step, rlx.ops.zeros((3, 40), "i32"), rows)
    g.output("y", y)
    made = rlx.compile(g, target=target.name, threads=1)
    x = rng.integers(0, 256, (5, 3, 40)).astype(np.uint8)
    total, want = np.zeros((3, 40), np.int64), []
    for row in x:
        total = product(row ^ (total & 255).astype(np.uint8), w)
        want.append(total)
    np.testing.assert_array_equal(made.run({"x": x})["y"], np.stack(want))
    packed = any(n.op.name == "pack_quads" for n in made.lir.derived.nodes) if made.lir.derived else False
    assert packed == (target.sums_in_pairs and how != "large")


@every_target
def test_sums_of_other_types(target: Target) -> None:
    """Only sums in i32 have kernels of their own; the others are native, too."""
    rng = np.random.default_rng(10)
    w, x = weights(rng, "small", 12, 24), left(rng, "i8", 5, 12)
    g = rlx.Graph("types")
    a, b = g.input("x", x.shape, "i8"), g.constant(w)
    for dtype in ("i8", "i16", "i32", "i64"):
        g.output(dtype, rlx.ops.dot_general(a, b, ((1,), (0,)), out_dtype=dtype))
    made = rlx.compile(g, target=target.name)
    assert not made.stats["host_thunks"]
    for dtype, found in made.run({"x": x}).items():
        np.testing.assert_array_equal(found, product(x, w).astype(found.dtype), dtype)


@every_target
def test_a_new_value_that_does_not_fit_is_refused(target: Target) -> None:
    rng = np.random.default_rng(8)
    w, x = weights(rng, "outliers", 96, 20), left(rng, "u8", 5, 96)
    made = program(target, "u8", w)
    fits = weights(rng, "small", 96, 20)
    made.set_param("w", fits)
    np.testing.assert_array_equal(made.run({"x": x})["y"], product(x, fits))
    large = weights(rng, "large", 96, 20)
    if target.small_bytes == "pairs":
        with pytest.raises(InputError, match="compile the program again"):
            made.set_param("w", large)
    else:
        made.set_param("w", large)
        np.testing.assert_array_equal(made.run({"x": x})["y"], product(x, large))


def test_layers_of_one_size_share_a_kernel() -> None:
    """Room is rounded up, so that a few large pairs more or less do not make another kernel."""
    rng = np.random.default_rng(11)
    tile = PanelTile("i8", columns=16, lanes=8, group=2, quads="pairs")
    made = set()
    for large in range(1, 7):
        w = weights(rng, "small", 384, 48)
        w[: 4 * large : 4, 5] = 127
        w[1 : 4 * large : 4, 5] = 2
        assert room_for(w, tile.columns) == large
        made.add(small_quads(w, tile))
    assert made == {QuadPanels(384, 48, 16, 8, 6)}


def test_columns_have_offsets_of_their_own() -> None:
    """Any 128 levels side by side have seven bits; of more, what is cut off waits."""
    rng = np.random.default_rng(12)
    for low in (-128, -127, -100, -64, -1, 0):
        w = rng.integers(low, low + 128, (64, 24)).astype(np.int8)
        assert room_for(w, 12, seven=True) == 0
    mixed = np.stack([rng.integers(low, low + 128, 64) for low in (-128, -64, 0)], 1).astype(np.int8)
    assert room_for(mixed, 12, seven=True) == 0
    mixed[8, 1] = 100
    assert room_for(mixed, 12, seven=True) == 1


@pytest.mark.parametrize("seven", [False, True])
def test_panels_hold_every_matrix(seven: bool) -> None:
    rng = np.random.default_rng(9)
    for how in WEIGHTS:
        for k, n in [(4, 1), (5, 16), (7, 3), (64, 48), *rng.integers(4, 60, (9, 2)).tolist()]:
            w = weights(rng, how, k, n)
            room = room_for(w, 16, seven)
            quads = QuadPanels(k, n, 16, 8, room, seven)
            packed = quads.pack(w)
            assert (quads.unpack(packed) == w).all() and quads.fault(packed) is None
            if seven:
                wrong = packed.copy()
                wrong[0] |= 128
                assert "seven bits" in str(quads.fault(wrong))
            if room:
                with pytest.raises(InputError, match="does not fit"):
                    QuadPanels(k, n, 16, 8, room - 1, seven).pack(w)
                packed[-4:] = 255
                assert "outside" in str(quads.fault(packed))
                last = quads.panels.tail or quads.columns
                packed[quads.places_at(last) - quads.panel_bytes(last) - 1] = 1
                assert "more steps" in str(quads.fault(packed))
