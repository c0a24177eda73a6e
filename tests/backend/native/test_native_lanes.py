"""Words of the notation that work on vectors, as the host computes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import compile_and_load
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    address_of,
    bitcast,
    concat,
    fma,
    gep,
    i64,
    iota,
    lanes,
    load,
    loop,
    masked_load,
    part,
    ptr,
    reduce_add,
    scatter,
    sitofp,
    splat,
    store,
    transpose,
    ugt,
)
from rlx.target.cpu import resolve


def compiled(function: Any) -> Callable[[np.ndarray, np.ndarray], None]:
    """A native function of two arrays of floats, for this machine."""
    host = resolve("host")
    module = Module(host)
    function.emit(module)
    code = compile_and_load(module.text(), host)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address(function.name))

    def run(source: np.ndarray, out: np.ndarray, keep: object = code) -> None:
        call(source.ctypes.data, out.ctypes.data)

    return run


def test_vectors_compute_lane_by_lane() -> None:
    @native
    def polynomial(source: ptr, out: ptr) -> None:
        for i in loop(0, 16, 4):
            x = load("<4 x float>", gep(source, i, "float"))
            place = sitofp(iota(4) + splat(i64(i), 4), "float")
            store(fma(x, x, place) - x / 2.0, gep(out, i, "float"))

    x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    compiled(polynomial)(x, out)
    np.testing.assert_array_equal(out, x * x + np.arange(16) - x / 2)


def test_parts_of_vectors() -> None:
    @native
    def turned(source: ptr, out: ptr) -> None:
        rows = [load("<4 x float>", gep(source, 4 * i, "float")) for i in range(4)]
        for i, column in enumerate(transpose(rows)):
            both = concat(column, rows[i])
            store(part(both, 2, 4), gep(out, 4 * i, "float"))
        store(reduce_add(rows[3]), gep(out, 16, "float"))

    x, out = np.arange(16, dtype=np.float32), np.zeros(17, np.float32)
    compiled(turned)(x, out)
    square = x.reshape(4, 4)
    np.testing.assert_array_equal(out[:16].reshape(4, 4), np.hstack([square.T[:, 2:], square[:, :2]]))
    assert out[16] == square[3].sum()


def test_lanes_that_do_not_exist_are_not_touched() -> None:
    @native
    def spread(source: ptr, out: ptr) -> None:
        there = lanes(3, 4)
        x = masked_load("<4 x float>", source, there)
        scatter(x, out, iota(4) * splat(i64(2), 4), there)
        is_high = ugt(address_of(out), 0)
        if is_high:
            store(bitcast(x, "<4 x i32>"), gep(out, 8, "float"))

    x, out = np.arange(1, 5, dtype=np.float32), np.full(12, -1, np.float32)
    compiled(spread)(x, out)
    np.testing.assert_array_equal(out, [1, -1, 2, -1, 3, -1, -1, -1, 1, 2, 3, 0])


@inline
def by_halves(values: list[Any]) -> Any:
    """A sum in a fixed tree."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return by_halves(values[:half]) + by_halves(values[half:])


def test_an_expanded_function_may_call_itself() -> None:
    """What it decides, Python knows, so that it ends."""

    @inline
    def local(n: int, x: Any) -> Any:
        return x if n == 0 else local(n - 1, x * 2.0)

    @native
    def total(source: ptr, out: ptr) -> None:
        store(by_halves([load("float", gep(source, i, "float")) for i in range(8)]), out)
        store(local(3, load("float", source)), gep(out, 1, "float"))

    x, out = np.arange(3, 11, dtype=np.float32), np.zeros(2, np.float32)
    compiled(total)(x, out)
    np.testing.assert_array_equal(out, [x.sum(), 8 * x[0]])


def test_nested_lists_are_carried() -> None:
    @native
    def sums(source: ptr, out: ptr) -> None:
        start = splat(0.0, 4)
        groups: list[list[Any]] = [[start, start], [start]]
        for i in loop(0, 16, 4):
            x = load("<4 x float>", gep(source, i, "float"))
            (total, squares), (last,) = groups
            groups = [[total + x, squares + x * x], [last * 0.0 + x]]
        for n, value in enumerate([v for group in groups for v in group]):
            store(value, gep(out, 4 * n, "float"))

    x, out = np.arange(16, dtype=np.float32), np.zeros(12, np.float32)
    compiled(sums)(x, out)
    square = x.reshape(4, 4)
    np.testing.assert_array_equal(out, np.hstack([square.sum(0), (square * square).sum(0), square[3]]))
