"""Matmuls in registers that hold matrices (AMX): exact bytes, bits of bf16, where the instructions are."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import rlx
from amx_model import product_of_bf16
from emission import first_cases
from exact_integers import KINDS, left, product, weights
from gemm_harness import Array, Guarded, random, run_weights, weight_kernel
from machines import to_execute
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.product.packing import pack_weights, panels_of
from rlx.codegen.native import jit
from rlx.ir.graph import Graph, Node
from rlx.plan import stream
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve, targets

NAME = "x86-64-v4-amx"
REAL = resolve(NAME)
INSTRUCTION = re.compile(r"\b(tdp\w+|tile\w+|ldtilecfg)\b")
ENDS: dict[str, Callable[[Node], Node]] = {
    "none": lambda y: y,
    "light": lambda y: y * 3 - 7,
    "heavy": lambda y: rlx.ops.clip(((y * 3 - 7) * y + 5) * 2 - y * y - 1, -(1 << 30), 1 << 30) + y,
}


@functools.cache
def target() -> Target:
    return resolve(to_execute(NAME))


def bytes_graph(dtype: str, w: np.ndarray, end: str = "none", m: int | str = "m") -> Graph:
    g = Graph("bytes")
    x, right = g.input("x", (m, w.shape[0]), dtype), g.param("w", w.shape, "i8", w)
    g.output("y", ENDS[end](rlx.ops.dot_general(x, right, ((1,), (0,)), out_dtype="i32")))
    return g


def halves_graph(w: np.ndarray, m: int | str = "m") -> Graph:
    g = Graph("halves")
    x, right = g.input("x", (m, w.shape[0]), "bf16"), g.param("w", w.shape, "bf16", w)
    g.output("y", rlx.ops.dot_general(x, right, ((1,), (0,)), out_dtype="f32"))
    return g


def instructions(graph: Graph, target: Target) -> set[str]:
    """Those of AMX that the code of a program has."""
    texts = build_kernels(plan(graph, target=target.name), target).texts
    return {found for text in texts for found in INSTRUCTION.findall(jit.assembly(text, target))}


COMMON = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"}
GRAPHS = {
    "tdpbusd": lambda: bytes_graph("u8", random((100, 70), "i8")),
    "tdpbssd": lambda: bytes_graph("i8", random((100, 70), "i8")),
    "tdpbf16ps": lambda: halves_graph(random((100, 70), "bf16")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_only_this_target_has_the_instructions(name: str) -> None:
    for other in targets():
        if other.x86:
            assert instructions(GRAPHS[name](), other) == ({name} | COMMON if other is REAL else set())


def test_other_products_have_none() -> None:
    """Convolutions, attention, and matmuls of two inputs."""
    for name in ("conv", "conv_integer", "attention", "sdpa", "softmax"):
        case = first_cases().get(name)
        assert case is None or not instructions(case.graph()[0], REAL)
    g = Graph("two")
    x, w = g.input("x", ("m", 40), "u8"), g.input("w", (40, 50), "i8")
    g.output("y", rlx.ops.dot_general(x, w, ((1,), (0,)), out_dtype="i32"))
    assert not instructions(g, REAL)


@pytest.mark.parametrize("dtype", ["u8", "i8", "bf16"])
def test_panels_are_those_of_vnni(dtype: str) -> None:
    """Files of weights serve both targets."""
    other = resolve("x86-64-v4-bf16-vnni")
    assert panels_of(77, 130, REAL, dtype) == panels_of(77, 130, other, dtype)


@pytest.mark.parametrize("dtype", ["u8", "i8"])
@pytest.mark.parametrize("heavy", [False, True])
def test_bytes_are_exact_for_all_sizes(dtype: str, heavy: bool) -> None:
    """Operands touch pages that cannot be read; the largest values are frequent."""
    for k, n in [(0, 5), (1, 1), (4, 16), (5, 17), (64, 48), (65, 33), (101, 203), (192, 96), (447, 50)]:
        for m in (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 65):
            for threads in (1, 2) if m > 1 else (1,):
                c, a, w = run_weights(target(), m, k, n, threads, dtype, heavy)
                np.testing.assert_array_equal(c, product(a, w))


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_blocks_of_rows(dtype: str) -> None:
    """More rows than one block holds, for several threads that share rows or columns."""
    for m, k, n in ((530, 70, 40), (70, 9000, 20), (300, 64, 700)):
        for threads in (1, 3):
            c, a, w = run_weights(target(), m, k, n, threads, dtype)
            np.testing.assert_array_equal(c, product(a, w))


@pytest.mark.parametrize("m", [1, 3, 16, 29, 64])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_epilogues_of_known_sizes(dtype: str, end: str, m: int) -> None:
    rng = np.random.default_rng(m)
    w, x = weights(rng, "outliers", 70, 51), left(rng, dtype, m, 70)
    graph = bytes_graph(dtype, w, end, m)
    wanted = evaluate(graph, {"x": x})["y"]
    for threads in (1, 2):
        made = rlx.compile(graph, target=target().name, threads=threads)
        np.testing.assert_array_equal(made.run({"x": x})["y"], wanted)


@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("zeros", [False, True])
def test_zero_points(kind: str, zeros: bool) -> None:
    rng = np.random.default_rng(4)
    w = weights(rng, "outliers", 131, 67)
    left_zero, right_zero = (200 if kind == "u8" else -90, 17) if zeros else (0, 0)
    g = Graph("zeros")
    x = g.input("x", ("m", 131), kind)
    points = [g.constant(np.array(left_zero, KINDS[kind])), g.constant(np.array(right_zero, np.int8))]
    g.output("y", rlx.ops.matmul_integer(x, g.param("w", w.shape, "i8", w), *points))
    made = rlx.compile(g, target=target().name, threads=2)
    for m in (1, 5, 40):
        given = left(rng, kind, m, 131)
        np.testing.assert_array_equal(made.run({"x": given})["y"], product(given, w, left_zero, right_zero))


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_rows_that_are_computed(dtype: str) -> None:
    """A prologue; behind its last k are zeros, whatever it computes there."""
    rng = np.random.default_rng(5)
    low, high = (0, 255) if dtype == "u8" else (-128, 127)
    for m, k, n in ((9, 37, 50), (1, 130, 64), (40, 63, 33), (70, 100, 130)):
        w = weights(rng, "outliers", k, n)
        x = rng.integers(low, high, (m, k), endpoint=True).astype(np.float32)
        g = Graph("computed")
        levels = rlx.ops.cast(rlx.ops.clip(g.input("x", ("m", k), "f32") * 2.0 + 3.0, low, high), dtype)
        g.output(
            "y", rlx.ops.dot_general(levels, g.param("w", w.shape, "i8", w), ((1,), (0,)), out_dtype="i32")
        )
        for threads in (1, 2):
            found = rlx.compile(g, target=target().name, threads=threads).run({"x": x})["y"]
            np.testing.assert_array_equal(found, product(np.clip(x * 2 + 3, low, high), w))


# ---- bf16


def same(found: Array, wanted: Array) -> None:
    """Equal bits; of NaN only that they are."""
    assert (np.isnan(found) == np.isnan(wanted)).all()
    assert np.where(np.isnan(found), 0, found).tobytes() == np.where(np.isnan(wanted), 0, wanted).tobytes()


@pytest.mark.parametrize(
    ("k", "n"), [(0, 5), (1, 1), (2, 16), (31, 17), (32, 48), (33, 50), (101, 203), (130, 96)]
)
def test_bits_of_bf16_are_those_of_the_manual(k: int, n: int) -> None:
    for m in (1, 2, 16, 17, 33):
        c, a, w = run_weights(target(), m, k, n, dtype="bf16")
        same(c, product_of_bf16(a, w))


def special(shape: tuple[int, int], seed: int) -> Array:
    """Denormals, infinities and zeros of both signs among usual numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, shape)
    x[rng.random(shape) < 0.1] = 1e-39
    x[rng.random(shape) < 0.01] = np.inf
    x[rng.random(shape) < 0.1] = -0.0
    x[rng.random(shape) < 0.05] = 3e-20
    return x.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("k", [33, 70, 200])
def test_special_numbers_stay_in_their_rows(k: int) -> None:
    """Also beside rows and k that only fill registers."""
    a, w = special((21, k), 1), special((k, 50), 2)
    guard, c = Guarded(), np.zeros((21, 50), np.float32)
    packed = guard.copy(pack_weights(w, target(), "bf16"), at_end=True)
    weight_kernel(target(), k, 50, "bf16").run([guard.copy(a, at_end=True), packed, c], {"m": 21})
    same(c, product_of_bf16(a, w))
    assert np.isinf(c).any()


@pytest.mark.parametrize(("k", "n"), [(70, 130), (384, 51)])
def test_bits_of_a_row_depend_on_nothing_else(k: int, n: int) -> None:
    """Not on the number of rows, their order, or threads."""
    a, w = random((77, k), "bf16", 1), random((k, n), "bf16", 2)
    packed, kernel = pack_weights(w, target(), "bf16"), weight_kernel(target(), k, n, "bf16")

    def run(x: Array, threads: int = 1) -> Array:
        c = np.zeros((len(x), n), np.float32)
        kernel.run([np.ascontiguousarray(x), packed, c], {"m": len(x)}, threads)
        return c

    whole = run(a)
    for threads in (2, 3, 8):
        assert run(a, threads).tobytes() == whole.tobytes()
    for start, stop in ((0, 1), (5, 6), (3, 20), (16, 48), (40, 77)):
        assert run(a[start:stop], 2).tobytes() == whole[start:stop].tobytes()
    assert run(a[::-1])[::-1].tobytes() == whole.tobytes()


@pytest.mark.parametrize("m", [1, 7, 40])
def test_programs_of_bf16(m: int) -> None:
    """Weights and rows that a program rounds to bf16, with ends in f32: known and open sizes, any threads."""
    rng = np.random.default_rng(m)
    w = rng.normal(0, 1, (100, 70)).astype(np.float32)
    x = rng.normal(0, 1, (m, 100)).astype(np.float32)
    found = []
    for rows in (m, "m"):
        g = Graph("layer")
        y = rlx.ops.matmul(rlx.ops.silu(g.input("x", (rows, 100), "f32")), g.param("w", w.shape, "f32", w))
        g.output("y", rlx.ops.gelu(y) + 1.0)
        assert "tdpbf16ps" in instructions_of_precision(g)
        for threads in (1, 2):
            made = rlx.compile(g, target=target().name, threads=threads, precision="bf16")
            found.append(made.run({"x": x})["y"])
            wanted = evaluate(g, {"x": x})["y"]
            np.testing.assert_allclose(found[-1], wanted, rtol=0.02, atol=0.2)
    assert len({y.tobytes() for y in found}) == 1


def instructions_of_precision(graph: Graph) -> set[str]:
    texts = build_kernels(plan(graph, target=NAME, precision="bf16"), REAL).texts
    return {found for text in texts for found in INSTRUCTION.findall(jit.assembly(text, REAL))}


def check_random(seed: int) -> None:
    """A product with weights: rows from memory or computed, also through a transpose, with any end; known and
    open sizes, one to three threads."""
    rng = np.random.default_rng(seed)
    kind, (m, k, n) = str(rng.choice(["u8", "i8", "bf16"])), (int(x) for x in rng.integers(1, 150, 3))
    batch, whole = int(rng.integers(1, 4)), kind != "bf16"
    swapped, computed, end = rng.random() < 0.3, rng.random() < 0.4, str(rng.choice(list(ENDS)))
    x = left(rng, kind, batch * m, k) if whole else random((batch * m, k), kind, seed)
    x = x.reshape((m, batch, k) if swapped else (batch, m, k))
    w = weights(rng, "outliers", k, n) if whole else random((k, n), kind, seed + 1)

    def graph(open_: bool) -> Graph:
        g = Graph("random")
        rows: tuple[int | str, ...] = ("m", batch, k) if swapped else (batch, "m", k)
        a = g.input("x", rows if open_ else x.shape, kind)
        a = rlx.ops.transpose(a, (1, 0, 2)) if swapped else a
        if computed:
            a = rlx.ops.bitwise_xor(a, 85) if whole else rlx.ops.maximum(a, 0.5)
        right = g.param("w", w.shape, "i8" if whole else kind, w)
        y = rlx.ops.dot_general(a, right, ((2,), (0,)), out_dtype="i32" if whole else "f32")
        g.output("y", ENDS[end](y) if whole else y * 0.5)
        return g

    feed, wanted = {"x": x}, evaluate(graph(False), {"x": x})["y"]
    options = [{"threads": int(t)} for t in rng.permutation(3)[:2] + 1]
    found = [
        rlx.compile(graph(open_), target=target().name, **given).run(feed)["y"]
        for open_ in (False, True)
        for given in options
    ]
    assert len({y.tobytes() for y in found}) == 1
    if whole:
        np.testing.assert_array_equal(found[0], wanted)
    else:
        rows = np.maximum(x, x.dtype.type(0.5)) if computed else x
        rows = (rows.transpose(1, 0, 2) if swapped else rows).reshape(-1, k)
        same(found[0].reshape(-1, n), product_of_bf16(rows, w) * np.float32(0.5))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    check_random(seed)


@pytest.mark.parametrize("kind", ["u8", "bf16"])
def test_weights_that_come_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are streamed: every part is a range of panels."""
    monkeypatch.setattr(stream, "MOST_GROUP", 16 << 10)
    g = Graph("parts")
    y = g.input("x", ("m", 256), kind)
    stored, out = ("i8", "i32") if kind == "u8" else (kind, "f32")
    for i in range(3):
        w = g.param(f"w{i}", (256, 256), stored, random((256, 256), stored, i))
        y = rlx.ops.dot_general(y, w, ((1,), (0,)), out_dtype=out)
        y = rlx.ops.cast(rlx.ops.bitwise_and(y, 255) if kind == "u8" else y * 0.05, kind)
    g.output("y", y)
    x = random((21, 256), kind, 9)
    made = rlx.compile(g, target=target().name, threads=2)
    parts = rlx.compile(g, target=target().name, threads=2, weight_budget="160KiB")
    assert max(fetch.parts for fetch in parts.lir.plan.fetches) > 2
    assert made.run({"x": x})["y"].tobytes() == parts.run({"x": x})["y"].tobytes()


def test_a_quantised_layer() -> None:
    """From bytes to bytes, as models of ONNX have it."""
    case = first_cases()["qlinear_matmul"]
    graph = case.graph()[0]
    made = rlx.compile(graph, target=target().name, threads=2)
    for name, wanted in evaluate(graph, case.feed()).items():
        np.testing.assert_array_equal(made.run(case.feed())[name], wanted)
