"""Winograd's transforms of bytes: sums are those of the definition, to the bit, as large as they may get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from conv_harness import compiled
from gemm_harness import Guarded, every_target
from rlx import ops
from rlx.config import WINOGRAD
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.ops.storage.packing import from_blocks, to_blocks
from rlx.ops.storage.winograd import (
    INTEGER_RESTORE,
    WHOLE,
    WHOLE_KERNEL,
    WHOLE_ROWS,
    WinogradLayout,
    most_channels,
    transform_kernel,
)
from rlx.target.cpu import Target, resolve


def layer(shape: tuple[int, ...], w: np.ndarray, target: Target, zero: int, padding: Any = 1) -> Graph:
    """A convolution of blocked bytes in Winograd's layout, whatever the cost model says."""
    lanes = target.lanes("f32")
    out, channels = w.shape[:2]
    layout = WinogradLayout(4, out, channels, 2 * lanes, lanes, 2)
    unpack = get_op("unpack_winograd")
    g = Graph("bytes")
    kernel = g.param("w", w.shape, "i8")
    g.set_param("w", w)
    there = unpack(transform_kernel(kernel, layout), **{k: getattr(layout, k) for k in unpack.attrs})
    blocks = (shape[0], channels // lanes, *shape[2:], lanes)
    x = from_blocks(g.input("x", blocks, "u8"), channels)
    y = ops.conv(x, there, padding=padding, out_dtype="i32", fill=zero)
    g.output("y", to_blocks(y, lanes))
    return g


def check(x: np.ndarray, w: np.ndarray, target: Target, zero: int = 0, padding: Any = 1) -> None:
    lanes = target.lanes("f32")
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=zero)
    want = to_blocks(ops.conv(wide.astype(np.float64), w.astype(np.float64)).astype(np.int32), lanes)
    g = layer(x.shape, w, target, zero, padding)
    programs = [rlx.compile(g, target=target.name, threads=n) for n in (1, 2)]
    assert not programs[0].stats["host_thunks"]
    for program in programs:
        np.testing.assert_array_equal(program(to_blocks(x, lanes)), want)


@every_target
@pytest.mark.parametrize(
    ("shape", "out", "zero"),
    [
        ((1, 16, 8, 8), 16, 0),
        ((2, 32, 11, 13), 40, 7),
        ((1, 48, 5, 3), 70, 255),
        ((3, 64, 1, 30), 32, 128),
        ((1, 272, 9, 6), 24, 3),
    ],
)
def test_sums_are_exact(shape: tuple[int, ...], out: int, zero: int, target: Target) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, shape).astype(np.uint8)
    check(x, rng.integers(-128, 128, (out, shape[1], 3, 3)).astype(np.int8), target, zero)


@every_target
@pytest.mark.parametrize("channels", [most_channels() // 16 * 16, 256])
def test_the_largest_sums_are_exact(channels: int, target: Target) -> None:
    x, w = np.full((1, channels, 6, 6), 255, np.uint8), np.full((16, channels, 3, 3), -128, np.int8)
    w[1], w[2] = 127, np.where(np.arange(9).reshape(3, 3) % 2, 127, -128)
    x[..., ::2, 1::2] = 0
    x[:, : channels // 2] = 255
    check(x, w, target, 255)
    check(np.full_like(x, 255), w, target, 255)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_few_sizes(data: st.DataObject) -> None:
    check_any_size(data)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    check_any_size(data)


def check_any_size(data: st.DataObject) -> None:
    size = st.integers(1, 14)
    shape = (
        data.draw(st.integers(1, 2)),
        16 * data.draw(st.integers(1, 3)),
        data.draw(size),
        data.draw(size),
    )
    padding = data.draw(st.integers(0 if min(shape[2:]) > 2 else 1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    w = rng.integers(-128, 128, (data.draw(st.integers(16, 70)), shape[1], 3, 3)).astype(np.int8)
    x = rng.integers(0, 256, shape).astype(np.uint8)
    check(x, w, resolve("host"), data.draw(st.integers(0, 255)), padding)


@pytest.mark.parametrize("at_end", [False, True])
def test_no_access_outside(at_end: bool) -> None:
    target, rng = resolve("host"), np.random.default_rng(4)
    lanes = target.lanes("f32")
    w = rng.integers(-128, 128, (32, 32, 3, 3)).astype(np.int8)
    x = rng.integers(0, 256, (1, 32 // lanes, 9, 10, lanes)).astype(np.uint8)
    program = rlx.compile(layer((1, 32, 9, 10), w, target, 5))
    want, guarded = program(x), Guarded()
    out = guarded.copy(np.zeros_like(want), at_end)
    program.bind({"x": guarded.copy(x, at_end)}, {"y": out})()
    np.testing.assert_array_equal(out, want)


def test_integer_tables_agree() -> None:
    assert all(WHOLE % row == 0 for row in WHOLE_ROWS[4])
    np.testing.assert_array_equal(np.array(INTEGER_RESTORE) @ WHOLE_KERNEL[4], np.diag([1, 2, 1]))


def quantised(channels: int, size: Any = 40, batch: Any = 1) -> Graph:
    rng, g = np.random.default_rng(8), Graph("layer")
    w = g.param("w", (64, channels, 3, 3), "i8")
    g.set_param("w", rng.integers(-128, 128, w.shape).astype(np.int8))
    x = ops.dequantize(g.input("x", (batch, channels, size, size), "u8"), np.float32(0.02), np.uint8(3))
    y = ops.conv(x, ops.dequantize(w, np.float32(0.001)), padding=1)
    g.output("y", ops.quantize(y, np.float32(0.5), np.uint8(100)))
    return g


def weights_of(program: Any) -> set[str]:
    return {p.dtype.name for p in program.lir.mir.params.values()}


@every_target
@pytest.mark.parametrize("channels", [64, 128])
def test_where_it_pays_it_is_used(channels: int, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    program, few = compiled(quantised(channels), target), compiled(quantised(channels, 7), target)
    assert "i16" in weights_of(program) and "i16" not in weights_of(few)
    x = np.random.default_rng(9).integers(0, 256, (1, channels, 40, 40)).astype(np.uint8)
    monkeypatch.setenv(WINOGRAD.name, "0")
    plain = compiled(quantised(channels), target)
    assert "i16" not in weights_of(plain)
    np.testing.assert_array_equal(program.run({"x": x})["y"], plain.run({"x": x})["y"])


def test_symbolic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(quantised(128, "s", "n"), threads=2)
    assert "i16" in weights_of(program)
    monkeypatch.setenv(WINOGRAD.name, "0")
    plain = compiled(quantised(128, "s", "n"))
    for n, size in ((1, 28), (2, 7), (0, 4), (3, 1)):
        x = np.random.default_rng(n).integers(0, 256, (n, 128, size, size)).astype(np.uint8)
        np.testing.assert_array_equal(program.run({"x": x})["y"], plain.run({"x": x})["y"])
