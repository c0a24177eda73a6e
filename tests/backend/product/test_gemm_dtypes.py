"""The GEMM kernels in other dtypes than f32: f64, 16-bit floats and bytes; their packed weights."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import rlx
from gemm_harness import HOST, assert_product, every_target, random, run_strided, run_weights
from rlx.codegen.cpu.product.gemm import GemmSpec, emit_gemm
from rlx.codegen.cpu.product.packing import pack_weights, panels_of
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Module
from rlx.ir.dtype import dtype as find
from rlx.target.cpu import Target, targets


@every_target
def test_f64(target: Target) -> None:
    for m in (1, 5, 12):
        c, a, w = run_weights(target, m, 30, 45, dtype="f64")
        assert_product(c, a, w, "f64")
    for transposed in ("", "a", "b"):
        c, a, b = run_strided(target, 2, 11, 37, 19, transposed, dtype="f64")
        assert_product(c, a, b, "f64")


@every_target
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8"])
@pytest.mark.parametrize(("k", "n"), [(0, 3), (3, 0), (1, 1), (5, 16), (7, 48), (9, 50), (4, 200)])
def test_packed_weights_unpack(target: Target, dtype: str, k: int, n: int) -> None:
    w = random((k, n), dtype)
    packed = pack_weights(w, target, dtype)
    panels = panels_of(k, n, target, dtype)
    assert packed.shape == (panels.elements,)
    assert (panels.layout.unpack(packed) == w).all()


# ---- bf16


@every_target
@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 1), (7, 5), (33, 50), (64, 48), (101, 203)])
def test_bf16_weights(target: Target, k: int, n: int) -> None:
    for m in (0, 1, 2, 3, 8, 9, 17):
        c, a, w = run_weights(target, m, k, n, dtype="bf16")
        assert_product(c, a, w, "bf16")


@every_target
@pytest.mark.parametrize("transposed", ["", "b", "a", "ab", "g"])
def test_bf16_strided(target: Target, transposed: str) -> None:
    shapes = [
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 17, 48, 64),
        (2, 33, 101, 37),
        (1, 2, 333, 77),
        (2, 3, 3, 0),
        (1, 170, 100, 40),
    ]
    for (batch, m, n, k), gap in itertools.product(shapes, (0, 3)):
        c, a, b = run_strided(target, batch, m, n, k, transposed, gap=gap, dtype="bf16")
        assert_product(c, a, b, "bf16")


def test_bf16_sums_in_f32() -> None:
    """Products of bf16 numbers are exact in f32, so only the sum is rounded, as in f32."""
    c, a, w = run_weights(HOST, 9, 64, 50, dtype="bf16")
    assert_product(c, a, w, "f32")


@every_target
def test_f16_weights(target: Target) -> None:
    for m in (1, 2, 9):
        c, a, w = run_weights(target, m, 33, 50, dtype="f16")
        assert_product(c, a, w, "f32")


# ---- bytes


@every_target
@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 1), (6, 5), (7, 50), (64, 48), (101, 203)])
def test_byte_weights(target: Target, dtype: str, k: int, n: int) -> None:
    for m in (0, 1, 2, 3, 8, 9, 17):
        c, a, w = run_weights(target, m, k, n, dtype=dtype)
        assert (c == a.astype(np.int32) @ w.astype(np.int32)).all()


@every_target
@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize("transposed", ["", "b", "a", "g"])
def test_bytes_strided(target: Target, dtype: str, transposed: str) -> None:
    shapes = [
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 17, 48, 64),
        (2, 33, 101, 38),
        (1, 2, 333, 77),
        (2, 3, 3, 0),
        (1, 170, 100, 1300),
    ]
    for (batch, m, n, k), gap in itertools.product(shapes, (0, 3)):
        c, a, b = run_strided(target, batch, m, n, k, transposed, gap=gap, dtype=dtype)
        assert (c == a.astype(np.int32) @ b.astype(np.int32)).all()


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_sums_of_bytes_stay_in_registers(dtype: str, rows: int) -> None:
    """On the target with the fewest registers among those with dot products of bytes; it need not run."""
    target = min((t for t in targets() if t.has_vnni), key=lambda t: t.registers)
    module, spec = Module(target), GemmSpec(rows, 256, 256, (256, 1), (), (256, 1), (), dtype, "i32", True)
    emit_gemm(module, "kernel", spec)
    text = jit.assembly(module.text(), target)
    loops = re.findall(r"^(\.LBB\w+):((?:\n(?!\.LBB).*)*?)\n\tj\w+\t\1$", text, re.MULTILINE)
    products = [body for _, body in loops if "vpdpbusd" in body]
    assert products and not any("(%rsp)" in body for body in products)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@every_target
def test_a_symbol_that_equals_a_side_of_packed_weights(target: Target, dtype: str) -> None:
    """The operand has a symbolic inner axis, the weights a number: the panels have that size."""
    kind = find(dtype).np
    x, w = (np.arange(n * m).reshape(n, m).astype(kind) for n, m in ((2, 3), (3, 20)))
    g = rlx.Graph("symbol")
    left, right = g.input("x", ("m", "n"), dtype), g.constant(w)
    g.output("y", left @ right)
    got = rlx.compile(g, target=target.name).run({"x": x})["y"]
    np.testing.assert_array_equal(got, (x.astype(np.float64) @ w.astype(np.float64)).astype(kind))


# ---- what becomes of the sums


@every_target
@pytest.mark.parametrize("dtype", ["bool", "i64", "u64", "u32", "u16", "f16"])
def test_an_epilogue_ends_in_any_dtype(target: Target, dtype: str) -> None:
    """x @ w > 0 and casts: the result's dtype is not one that products read."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 4, (9, 33)), rng.integers(0, 4, (33, 21))
    g = rlx.Graph("compared")
    sums = g.input("x", x.shape, "f32") @ g.input("w", w.shape, "f32")
    g.output("y", sums > 70.0 if dtype == "bool" else rlx.ops.cast(sums, dtype))
    feed = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    y = rlx.compile(g, target=target.name).run(feed)["y"]
    want = (x @ w > 70) if dtype == "bool" else x @ w
    assert y.dtype == rlx.ir.dtype.dtype(dtype).np
    np.testing.assert_array_equal(y, want)
