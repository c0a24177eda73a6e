"""Products with 4-bit and 8-bit weights against the same weights in f64."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlx
from coded_weights import BITS, SHIFTS, coded_weights, sampled, shift_name
from machines import executable, on_targets
from rlx.codegen.cpu.product.quant_gemm import emit_quant_gemm, quant_layout
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Function, Int, Module, Value
from rlx.errors import ShapeError
from rlx.ir.dim import sym
from rlx.kernel.panels import QuantLayout
from rlx.target.cpu import Target, resolve

Array = NDArray[Any]
TARGETS = executable()
every_target = on_targets(TARGETS)
SHAPES = [(64, 32, 32), (96, 200, 32), (40, 5, 8), (100, 33, 16), (1, 1, 32)]
EPS = 2.0**-23


class Product:
    """Random weights in a layout, and the kernel that multiplies by them."""

    def __init__(
        self, target: Target, layout: QuantLayout, epilogue: Any = None, precision: str = "f32"
    ) -> None:
        self.layout, self.precision, self.coded = layout, precision, coded_weights(layout)
        weights = self.coded
        self.weights, self.bound, self.packed = weights.matrix, weights.sizes, weights.packed
        assert self.packed.nbytes == layout.nbytes
        module = Module(target)
        info = emit_quant_gemm(
            module,
            "kernel",
            sym("m"),
            layout,
            precision=precision,
            dim_value=lambda fn, _: fn.field(fn.args[0], 6),
            epilogue=epilogue,
        )
        self.scratch = info.scratch_bytes_per_thread
        self.code = jit.compile_and_load(module.text(), target)
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.call = ctypes.CFUNCTYPE(None, *types)(self.code.address("kernel"))

    def run(self, a: Array, threads: int = 1, only: int | None = None) -> Array:
        """The product; of one of the threads alone, if so. What is not written is 7."""
        rows = len(a)
        c = np.full((rows + 1, self.layout.n), 7, np.float32)
        scratch = np.zeros(threads * self.scratch, np.uint8)
        pointers = [x.ctypes.data for x in (a, self.packed, c)]
        table = np.array([0, scratch.ctypes.data, self.scratch, *pointers, rows], np.int64)
        for thread in range(threads) if only is None else [only]:
            self.call(table.ctypes.data, thread, threads, 0)
        assert (c[rows] == 7).all()
        return c[:rows]

    def check(self, a: Array, c: Array) -> None:
        # bf16 parts of A keep 16 bits, which 2 K eps covers from K = 64 on.
        eps = EPS if self.precision == "f32" else 2.0**-8
        slack = 2 * max(self.layout.k, 64) * eps * (np.abs(a).astype(np.float64) @ self.bound)
        assert (np.abs(c - a @ self.weights) <= slack).all()


def rows_of(count: int, k: int) -> Array:
    return np.random.default_rng(count).standard_normal((count, k)).astype(np.float32)


@every_target
@pytest.mark.parametrize(("bits", "shift", "shape"), sampled(BITS, SHIFTS, SHAPES))
def test_products(target: Target, bits: int, shift: dict[str, Any], shape: tuple[int, int, int]) -> None:
    k, n, group = shape
    product = Product(target, quant_layout(k, n, target, bits, group, **shift))
    for rows in (0, 1, 2, 3, 4, 5, 9, 33, 70):
        a = rows_of(rows, k)
        product.check(a, product.run(a))


@every_target
@pytest.mark.parametrize(("bits", "shift"), sampled(BITS, SHIFTS))
def test_bits_of_a_row_are_those_alone(target: Target, bits: int, shift: dict[str, Any]) -> None:
    """Weights that are decoded for many rows give the same bits as those decoded in registers for one."""
    product = Product(target, quant_layout(520, 75, target, bits, 16, **shift))
    a = rows_of(150, 520)
    alone = np.concatenate([product.run(a[i : i + 1]) for i in range(len(a))])
    for rows in (*range(2, 27), 31, 64, 127, 128, 129, 150):
        found = product.run(a[:rows])
        np.testing.assert_array_equal(found.view(np.uint32), alone[:rows].view(np.uint32), f"{rows} rows")
    product.check(a, product.run(a, threads=3))


@every_target
@pytest.mark.parametrize("shift", SHIFTS, ids=shift_name)
def test_bits_of_six_are_those_of_eight(target: Target, shift: dict[str, Any]) -> None:
    """The same numbers in the same order, but for targets that take codes of six bits as bf16 numbers."""
    six = Product(target, quant_layout(100, 75, target, 6, 16, **shift))
    wide = QuantLayout(100, 75, 8, 16, target.lanes("f32"), **shift)
    eight = Product(target, wide)
    eight.packed = wide.pack(six.coded.codes, *six.coded.stored)
    for rows in (1, 3, 40):
        a = rows_of(rows, 100)
        if not target.has_bf16:
            np.testing.assert_array_equal(six.run(a).view(np.uint32), eight.run(a).view(np.uint32))
        six.check(a, eight.run(a))


def test_rows_too_long_for_the_cache_come_in_shorter_blocks() -> None:
    host = resolve("host")
    product = Product(host, quant_layout(40_000, 33, host, group=64))
    a = rows_of(40, 40_000)
    alone = np.concatenate([product.run(a[i : i + 1]) for i in (0, 31, 32, 39)])
    np.testing.assert_array_equal(product.run(a)[[0, 31, 32, 39]], alone)
    product.check(a, product.run(a))


@pytest.mark.parametrize("bits", BITS)
def test_bf16_precision(bits: int) -> None:
    host = resolve("host")
    product = Product(host, quant_layout(96, 100, host, bits), precision="bf16")
    for rows in (1, 2, 3, 6, 7, 40):
        a = rows_of(rows, 96)
        product.check(a, product.run(a))


@pytest.mark.parametrize("bits", BITS)
def test_bits_depend_on_neither_rows_nor_threads(bits: int) -> None:
    host = resolve("host")
    product = Product(host, quant_layout(128, 300, host, bits))
    for rows in (40, 70, 150, 300):
        a = rows_of(rows, 128)
        wanted = product.run(a)
        for threads in (2, 3, 5, 20):
            assert (product.run(a, threads) == wanted).all()
    for first, stop in ((0, 1), (5, 7), (10, 13), (3, 12)):
        assert (product.run(np.ascontiguousarray(a[first:stop])) == wanted[first:stop]).all()


@every_target
@pytest.mark.parametrize("precision", ["f32", "i8"])
def test_threads_share_rows_where_there_are_many(target: Target, precision: str) -> None:
    """A thread prepares no rows of another one if rows are many; if weights are, it decodes none of it."""
    narrow = Product(target, quant_layout(32, 96, target, precision=precision), precision=precision)
    for rows, threads, own in ((128, 2, 64), (130, 2, 65), (128, 4, 32)):
        written = narrow.run(rows_of(rows, 32), threads, only=0) != 7
        assert written[:own].all() and not written[own:].any()
    for rows, threads in ((63, 2), (16, 4)):
        written = narrow.run(rows_of(rows, 32), threads, only=0) != 7
        panels = -(-96 // narrow.layout.columns) // threads
        assert written[:, : panels * narrow.layout.columns].all()
        assert not written[:, panels * narrow.layout.columns :].any()
    wide = Product(target, quant_layout(32, 16_384, target, precision=precision), precision=precision)
    written = wide.run(rows_of(64, 32), 2, only=1) != 7
    assert written[:, 8192:].all() and not written[:, :8192].any()
    for rows, threads in ((70, 3), (150, 7)):  # bands are not as many as threads: parts meet, none overlap
        parts = [narrow.run(rows_of(rows, 32), threads, only=thread) != 7 for thread in range(threads)]
        assert (np.sum(parts, axis=0) == 1).all()


@every_target
def test_the_next_block_is_prefetched_group_by_group(target: Target) -> None:
    """Tiles prefetch it while they multiply: all of it at once would wait for memory."""
    module = Module(target)
    layout = quant_layout(512, 64, target, bits=8)
    emit_quant_gemm(module, "kernel", 16, layout)
    for body in re.split(r"(?m)^define ", module.text())[1:]:
        name = re.search(r"@\"?([\w.]+)", body)
        assert name is not None
        wanted = name[1].startswith("kernel.block") or name[1].endswith("x1")
        assert ("@llvm.prefetch" in body.split("\n}")[0]) == wanted, name[1]


@every_target
def test_epilogue(target: Target) -> None:
    def add_row(
        fn: Function, sums: Value, row: Int, column: Int, mask: Value | None, batch: tuple[Int, ...]
    ) -> Value:
        return fn.fadd(sums, fn.splat(fn.sitofp(fn.value(row), "float"), sums.width))

    layout = quant_layout(64, 50, target)
    plain, shifted = Product(target, layout), Product(target, layout, add_row)
    a = rows_of(7, 64)
    assert np.allclose(shifted.run(a), plain.run(a) + np.arange(7)[:, None], rtol=1e-6)


def test_infinite_and_missing_numbers_pass() -> None:
    host = resolve("host")
    product = Product(host, quant_layout(64, 20, host))
    a = rows_of(3, 64)
    a[1, 5], a[2, 7] = np.inf, np.nan
    c = product.run(a)
    assert np.isfinite(c[0]).all()
    assert np.isnan(c[2]).all()
    used = product.weights[5] != 0
    assert (c[1, used] == np.sign(product.weights[5, used]) * np.inf).all()


def test_refusals() -> None:
    host = resolve("host")
    with pytest.raises(ShapeError, match="4, 6 or 8 bits, not 3"):
        quant_layout(8, 8, host, bits=3)
    with pytest.raises(ShapeError, match="multiple of 8 along k, not 12"):
        quant_layout(8, 8, host, group=12)
    layout = quant_layout(8, 2, host, group=8)
    with pytest.raises(ShapeError, match=r"an array of shape \(8, 3\) has not the layout"):
        layout.pack(np.zeros((8, 3), np.int8), np.ones((1, 2), np.float32))
    with pytest.raises(ShapeError, match=r"codes of 4 bits must be in -8\.\.7"):
        layout.pack(np.full((8, 2), 9, np.int8), np.ones((1, 2), np.float32))
    with pytest.raises(ShapeError, match=r"codes of 8 bits must be in -128\.\.127"):
        quant_layout(8, 2, host, bits=8, group=8).pack(np.full((8, 2), 128), np.ones((1, 2), np.float32))
    with pytest.raises(ShapeError, match="zeros are given exactly when"):
        layout.pack(np.zeros((8, 2), np.int8), *[np.ones((1, 2), np.float32)] * 2)


@pytest.mark.parametrize("shift", SHIFTS, ids=shift_name)
@pytest.mark.parametrize("bits", BITS)
def test_a_program_keeps_the_weights_in_their_bits(bits: int, shift: dict[str, Any]) -> None:
    """Product, bias and activation are one kernel that reads the codes; rows of any number."""
    k, n, group, rng = 72, 50, 32, np.random.default_rng(0)
    weights = coded_weights(quant_layout(k, n, resolve("host"), bits, group, **shift))
    g = rlx.Graph("quantised")
    w = rlx.ops.dequantize_groups(*weights.nodes(g), **weights.options)
    x = g.input("x", ("m", k), "f32")
    g.output("y", rlx.ops.relu(x @ w + 1.0))
    program = rlx.compile(g)
    assert program.stats["kernels"] == 1 and not program.stats["host_thunks"]
    assert program.memory({"m": 4})["weight"] <= weights.packed.nbytes + 256
    for m in (1, 2, 7, 33):
        rows = rng.standard_normal((m, k)).astype(np.float32)
        wanted = np.maximum(rows @ weights.matrix + 1, 0)
        room = 2 * k * 2.0**-23 * (abs(rows) @ weights.sizes + 1)
        assert (abs(program(rows) - wanted) <= room).all()


def test_products_of_one_value_are_joined() -> None:
    """Factors in blocks are joined as codes."""
    host, rng, g = resolve("host"), np.random.default_rng(0), rlx.Graph("joined")
    x = g.input("x", (4, 512), "f32")
    weights = []
    for i in range(3):
        weights.append(coded_weights(quant_layout(512, 32 + i, host, scale="f16", minimums=True, block=8)))
        matrix = rlx.ops.dequantize_groups(*weights[-1].nodes(g, f"w{i}"), **weights[-1].options)
        g.output(f"y{i}", rlx.ops.max(x @ matrix, axis=1))
    program = rlx.compile(g)
    assert sum(node.op.heavy for node in program.lir.unfused.nodes) == 1
    joined = quant_layout(512, 99, host, scale="f16", minimums=True, block=8)
    assert program.memory({})["weight"] <= joined.nbytes + 256
    rows = rng.standard_normal((4, 512)).astype(np.float32)
    for i, found in enumerate(program.run({"x": rows}).values()):
        np.testing.assert_allclose(found, (rows @ weights[i].matrix).max(1), rtol=1e-4)
