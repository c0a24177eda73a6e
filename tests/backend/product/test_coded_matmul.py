"""Rows rounded to 8 bits times weights of 4 to 8 bits: every bit is that of NumPy, on every target."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlx
from coded_weights import BITS, SHIFTS, Coded, coded_weights, sampled, shift_name
from machines import executable, on_targets
from rlx import ops
from rlx.codegen.cpu.product.quant_gemm import emit_quant_gemm, quant_layout
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Module
from rlx.ir.dim import sym
from rlx.kernel.panels import QuantLayout
from rlx.kernel.rounded import round_groups
from rlx.target.cpu import Target, resolve

Array = NDArray[Any]
every_target = on_targets(executable())


class Product:
    """Random weights in a layout, and the kernel that multiplies rounded rows by them."""

    def __init__(self, target: Target, layout: QuantLayout, extreme: bool = False) -> None:
        self.layout, self.weights = layout, coded_weights(layout, extreme)
        self.packed = self.weights.packed
        module = Module(target)
        info = emit_quant_gemm(
            module,
            "kernel",
            sym("m"),
            layout,
            precision="i8",
            dim_value=lambda fn, _: fn.field(fn.args[0], 6),
        )
        self.scratch = info.scratch_bytes_per_thread
        self.code = jit.compile_and_load(module.text(), target)
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.call = ctypes.CFUNCTYPE(None, *types)(self.code.address("kernel"))

    def run(self, x: Array, threads: int = 1) -> Array:
        y = np.full((len(x) + 1, self.layout.n), 7, np.float32)
        scratch = np.zeros(threads * self.scratch, np.uint8)
        pointers = [a.ctypes.data for a in (x, self.packed, y)]
        table = np.array([0, scratch.ctypes.data, self.scratch, *pointers, len(x)], np.int64)
        for thread in range(threads):
            self.call(table.ctypes.data, thread, threads, 0)
        assert (y[len(x)] == 7).all()
        return y[: len(x)]

    def check(self, x: Array, threads: int = 1) -> None:
        own = self.weights
        with np.errstate(invalid="ignore"):
            wanted = ops.coded_matmul(x, own.codes, *own.factors, **own.options)
        same(self.run(x, threads), wanted)


def same(found: Array, wanted: Array) -> None:
    """Equal bits; any NaN is as good as another."""
    missing = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), missing)
    bits = [np.where(missing, 0, a.view(np.int32)) for a in (found, wanted)]
    np.testing.assert_array_equal(*bits)


def rows_of(count: int, k: int) -> Array:
    """Rows of all sizes; some are zeros, some are tiny, some have numbers that are none."""
    x = np.random.default_rng(count).standard_normal((count, k)).astype(np.float32)
    for i, change in enumerate((1, 0, 1e-35, 1e30, np.nan, np.inf, 1e-30)):
        x[i::11, : k // 2 + 1] *= np.float32(change)
    return x


SHAPES = [(64, 32, 32), (96, 200, 32), (40, 5, 8), (100, 33, 16), (1, 1, 32), (300, 40, 128), (520, 70, 256)]


@every_target
@pytest.mark.parametrize(("bits", "shift", "shape"), sampled(BITS, SHIFTS, SHAPES))
def test_bits_are_those_of_the_reference(
    target: Target, bits: int, shift: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    k, n, group = shape
    product = Product(target, quant_layout(k, n, target, bits, group, precision="i8", **shift))
    for rows in (0, 1, 2, 3, 7, 13, 40):
        product.check(rows_of(rows, k))
    product.check(rows_of(150, k), threads=3)


@every_target
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("minimums", [False, True])
def test_nothing_saturates(target: Target, bits: int, group: int, minimums: bool) -> None:
    """All codes and numbers at their ends: sums of pairs are the largest that there are."""
    layout = quant_layout(256, 40, target, bits, group, precision="i8", minimums=minimums)
    product = Product(target, layout, extreme=True)
    signs = np.sign(np.random.default_rng(0).standard_normal((20, 256))).astype(np.float32)
    signs[0], signs[1] = 1, -1
    product.check(signs)
    product.weights.codes[:] = (1 << bits) - 1 if minimums else -(1 << (bits - 1))
    product.packed = product.weights.packed
    product.check(signs)


def test_rounding() -> None:
    """Half to even; sizes below 2**-100 are zeros, and what is no number shows in the scale."""
    x = np.array([127, 0.5, 1.5, -2.5, 2.0**-101, 0, 0, 0, 3, np.inf, 0, 0, 3, np.nan, 0, 0], np.float32)
    codes, scales = round_groups(x, 4)
    assert codes.tolist() == [[127, 0, 2, -2], [0] * 4, [0] * 4, [0] * 4]
    assert scales[:2].tolist() == [1, 0] and np.isnan(scales[2:]).all()


def program_of(bits: int, shift: dict[str, Any], m: Any, **options: Any) -> tuple[Any, Coded]:
    weights = coded_weights(quant_layout(72, 50, resolve("host"), bits, precision="i8", **shift))
    g = rlx.Graph("coded")
    x = g.input("x", (m, 72), "f32")
    g.output("y", ops.relu(ops.coded_matmul(x, *weights.nodes(g), **weights.options) + 1.0))
    return rlx.compile(g, **options), weights


@pytest.mark.parametrize("shift", SHIFTS, ids=shift_name)
@pytest.mark.parametrize("bits", BITS)
def test_a_program_keeps_the_weights_in_their_bits(bits: int, shift: dict[str, Any]) -> None:
    """Product, bias and activation are one kernel that reads the codes; rows of any number."""
    program, weights = program_of(bits, shift, "m")
    assert program.stats["kernels"] == 1 and not program.stats["host_thunks"]
    assert program.memory({"m": 4})["weight"] <= weights.packed.nbytes + 256
    for m in (1, 2, 7, 33):
        x = rows_of(m, 72)
        with np.errstate(invalid="ignore"):
            sums = ops.coded_matmul(x, weights.codes, *weights.factors, **weights.options)
            wanted = np.where(np.isnan(sums), sums, np.maximum(sums + np.float32(1), 0))
        same(program(x), wanted)


def test_products_of_one_value_are_joined() -> None:
    """Three matmuls of the same rows round them once."""
    rng, g = np.random.default_rng(0), rlx.Graph("joined")
    x = g.input("x", (4, 64), "f32")
    weights = []
    for i in range(3):
        codes = rng.integers(-8, 8, (64, 32)).astype(np.int8)
        scales = rng.uniform(0.1, 1, (2, 32)).astype(np.float32)
        weights.append((codes, scales))
        held = (
            g.param(f"q{i}", codes.shape, "i8", value=codes),
            g.param(f"s{i}", (2, 32), "f32", value=scales),
        )
        g.output(f"y{i}", ops.max(ops.coded_matmul(x, *held), axis=1))
    program = rlx.compile(g)
    rows = rows_of(4, 64)[:4]
    found = program.run({"x": rows})
    assert sum(node.op.heavy for node in program.lir.unfused.nodes) == 1
    for i, (codes, scales) in enumerate(weights):
        same(found[f"y{i}"], ops.coded_matmul(rows, codes, scales).max(1))


def test_refusals() -> None:
    x, codes, scales = np.ones((2, 8), np.float32), np.ones((8, 3), np.int8), np.ones((1, 3), np.float32)
    with pytest.raises(rlx.errors.ShapeError, match="codes have 4, 6 or 8 bits, not 5"):
        ops.coded_matmul(x, codes, scales, bits=5)
    with pytest.raises(rlx.errors.DTypeError, match="is not a matrix of f32; cast it"):
        ops.coded_matmul(x.astype(np.float64), codes, scales)
    with pytest.raises(rlx.errors.ShapeError, match="do not fit"):
        ops.coded_matmul(x[:, :7], codes, scales)
    with pytest.raises(rlx.errors.ShapeError, match="not one row for each group"):
        ops.coded_matmul(x, codes, scales, group=4)
    with pytest.raises(rlx.errors.ShapeError, match="takes codes, scales and minimums"):
        ops.coded_matmul(x, codes.view(np.uint8), scales, group=8, minimums=True)
    with pytest.raises(rlx.errors.DTypeError, match="are not a matrix of u8"):
        ops.coded_matmul(x, codes, scales, scales, group=8, minimums=True)


def test_layouts() -> None:
    """8-bit codes are in quads for these kernels only."""
    host = resolve("host")
    layout = quant_layout(64, 8, host, 8, precision="i8")
    codes = np.random.default_rng(0).integers(-128, 128, (64, 8)).astype(np.int8)
    packed = layout.pack(codes, np.ones((2, 8), np.float32))
    np.testing.assert_array_equal(layout.codes.unpack(packed), codes)
    assert packed[layout.codes_start : layout.codes_start + 4].view(np.int8).tolist() == codes[:4, 0].tolist()
    assert layout.layouts != quant_layout(64, 8, host, 8).layouts
    small = QuantLayout(64, 8, bits=4, group=32, lanes=8, quads=True)
    assert small == QuantLayout(64, 8, bits=4, group=32, lanes=8), "quads are of 8 bits"
