"""The IR text layer: folding, control, memory, conversions and lanes, run on every target of this machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import executable
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Function, Module, Value, constant, lanes_of, like, vector, width
from rlx.errors import CompileError
from rlx.target.cpu import Target, resolve

RUNNABLE = executable()
every_target = pytest.mark.parametrize("target", RUNNABLE, ids=lambda target: target.name)
HOST = resolve("host")


def run(target: Target, build: Callable[..., Any], *operands: Any) -> None:
    """Build `kernel(operands...)` (arrays as pointers, ints as i64) and call it once."""
    module = Module(target)
    kinds = ["ptr" if isinstance(x, np.ndarray) else "i64" for x in operands]
    f = module.function("kernel", [(kind, f"a{i}") for i, kind in enumerate(kinds)])
    build(f, *f.args)
    code = jit.compile_and_load(module.text(), target)
    types = [ctypes.c_void_p if kind == "ptr" else ctypes.c_int64 for kind in kinds]
    native = ctypes.CFUNCTYPE(None, *types)(code.address("kernel"))
    native(*[x.ctypes.data if isinstance(x, np.ndarray) else x for x in operands])


def integers(build: Callable[[Function, Value, Value], Any], a: int, b: int) -> int:
    """The i64 that `build` computes from two run-time numbers."""
    out = np.zeros(1, np.int64)
    run(HOST, lambda f, p, x, y: f.store(f.value(build(f, x, y)), p), out, a, b)
    return int(out[0])


# ---- folding


def test_python_ints_fold_and_leave_no_code() -> None:
    f = Module(HOST).function("f", [("i64", "n")])
    (n,) = f.args
    before = len(f.text())
    assert (f.add(2, 3), f.mul(4, 5), f.ceildiv(7, 3), f.smin(1, 2), f.cmp("slt", 1, 2)) == (
        5,
        20,
        3,
        1,
        True,
    )
    assert (
        f.add(n, 0) is n and f.mul(1, n) is n and f.mul(n, 0) == 0 and f.udiv(n, 1) is n and f.shl(n, 0) is n
    )
    assert f.select(True, n, 7) is n and f.select(f.cmp("sgt", 2, 3), n, 7) == 7
    assert f.loop(3, 3, 1, [constant("float", 1.0)], lambda i, c: c) == [constant("float", 1.0)]
    assert len(f.text()) == before


def test_a_single_trip_is_not_a_loop() -> None:
    f = Module(HOST).function("f", [])
    assert f.loop(5, 8, 4, [], lambda i, c: None if i == 5 else pytest.fail("the index is the int 5")) == []
    assert "br " not in f.text()


@given(st.integers(-(2**40), 2**40), st.integers(-(2**20), 2**20).filter(bool))
def test_folded_division_is_pythons(a: int, b: int) -> None:
    f = Module(HOST).function("f", [])
    assert (f.floordiv(a, b), f.floormod(a, b)) == divmod(a, b)
    quotient, remainder = f.sdiv(a, b), f.srem(a, b)
    assert quotient * b + remainder == a and abs(remainder) < abs(b) and remainder * a >= 0


@pytest.mark.parametrize(
    ("a", "b"), [(7, 3), (-7, 3), (7, -3), (-7, -3), (6, 3), (-6, 3), (0, 5), (-1, 2**40)]
)
def test_native_floor_division_is_pythons(a: int, b: int) -> None:
    assert integers(lambda f, x, y: f.floordiv(x, y), a, b) == a // b
    assert integers(lambda f, x, y: f.floormod(x, y), a, b) == a % b
    assert integers(lambda f, x, y: f.floordiv(x, b), a, b) == a // b
    assert integers(lambda f, x, y: f.floormod(x, b), a, b) == a % b


def test_native_integers() -> None:
    assert integers(lambda f, x, y: f.round_up(x, y), 13, 4) == 16
    assert integers(lambda f, x, y: f.smax(f.smin(x, y), -2), -7, 3) == -2
    assert integers(lambda f, x, y: f.xor(f.or_(x, y), f.not_(f.and_(x, 5))), 6, 9) == (6 | 9) ^ ~(6 & 5)
    assert integers(lambda f, x, y: f.select(f.cmp("ult", x, y), 1, 2), -1, 1) == 2
    assert integers(lambda f, x, y: f.ashr(f.shl(x, y), 1), -3, 4) == -24


def test_operands_of_different_types_are_refused() -> None:
    f = Module(HOST).function("f", [("i64", "a"), ("i32", "b")])
    with pytest.raises(CompileError, match="i32, i64"):
        f.add(*f.args)
    with pytest.raises(CompileError, match=r"1\.5"):
        f.add(f.args[0], 1.5)


def test_types_and_literals() -> None:
    assert (
        vector("float", 1) == "float" and like("<8 x i1>", "double") == "<8 x double>" and width("i64") == 1
    )
    assert constant("float", 0.1).text == "0x3FB99999A0000000"
    assert constant("bfloat", 1.0).text == "0xR3F80" and constant("half", 1.0).text == "0xH3C00"
    assert constant("<4 x float>", float("inf")).text == "splat (float 0x7FF0000000000000)"
    assert constant("i64", 2**64 - 1).text == "-1"
    assert constant("float", 1e300) == constant("float", float("inf"))


# ---- control


@every_target
def test_loop_carries_values_and_skips_empty_ranges(target: Target) -> None:
    out = np.zeros(3, np.int64)

    def build(f: Function, p: Value, n: Value) -> None:
        total, last = f.loop(0, n, 3, [0, -1], lambda i, c: [f.add(c[0], i), i])
        f.store(total, p)
        f.store(last, f.gep(p, 1, "i64"))
        (count,) = f.while_loop([n], lambda c: f.cmp("sgt", c[0], 100), lambda c: [f.sub(c[0], 100)])
        f.store(count, f.gep(p, 2, "i64"))

    run(target, build, out, 10)
    assert out.tolist() == [0 + 3 + 6 + 9, 9, 10]
    run(target, build, out, 0)
    assert out.tolist() == [0, -1, 0]
    run(target, build, out, 1234)
    assert out[2] == 34


def test_nested_loops_and_branches_inside() -> None:
    out = np.zeros(2, np.int64)

    def build(f: Function, p: Value, n: Value) -> None:
        def row(i: Any, c: list[Value]) -> Any:
            def column(j: Any, d: list[Value]) -> Any:
                even = f.cmp("eq", f.and_(f.add(i, j), 1), 0)
                return f.if_value(even, lambda: [f.add(d[0], 1)], lambda: [d[0]])

            return f.loop(0, n, 1, c, column)

        (total,) = f.loop(0, n, 1, [0], row)
        f.branch(f.cmp("sgt", total, 10), lambda: f.store(total, p), lambda: f.store(-1, p))
        f.branch(True, lambda: f.store(5, f.gep(p, 1, "i64")))

    run(HOST, build, out, 7)
    assert out.tolist() == [25, 5]


def test_return_inside_a_branch() -> None:
    out = np.zeros(1, np.int64)

    def build(f: Function, p: Value, n: Value) -> None:
        f.branch(f.cmp("eq", n, 0), lambda: f.return_())
        f.store(n, p)

    run(HOST, build, out, 0)
    assert out[0] == 0
    run(HOST, build, out, 9)
    assert out[0] == 9


def test_a_loop_body_must_give_what_it_carries() -> None:
    f = Module(HOST).function("f", [("i64", "n"), ("i32", "x")])
    with pytest.raises(CompileError, match="carries i64, its body gives i32"):
        f.loop(0, f.args[0], 1, [0], lambda i, c: [f.args[1]])


def test_calls_tables_and_function_pointers() -> None:
    out = np.zeros(4, np.int64)
    module = Module(HOST)
    for name, factor in (("twice", 2), ("thrice", 3)):
        g = module.function(name, [("i64", "x")], internal=True, noinline=True, returns="i64")
        g.return_(g.mul(g.args[0], factor))
    f = module.function("kernel", [("ptr", "out"), ("i64", "n")])
    p, n = f.args
    table = module.table("functions", "ptr", ["twice", "thrice"])
    numbers = module.table("numbers", "i64", [5, 2**63 + 1])
    assert module.table("again", "i64", [5, 2**63 + 1]) == numbers, "equal tables are stored once"
    f.store(f.call("twice", [n], "i64"), p)
    f.store(f.call(f.load("ptr", f.gep(table, 1, "ptr"), 8), [n], "i64"), f.gep(p, 1, "i64"))
    f.store(f.load("i64", f.gep(numbers, 1, "i64")), f.gep(p, 2, "i64"))
    f.store(f.field(p, 1), f.gep(p, 3, "i64"))
    code = jit.compile_and_load(module.text(), HOST)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("kernel"))(out.ctypes.data, 7)
    assert out.tolist() == [14, 21, 1 - 2**63, 21]
    with pytest.raises(CompileError, match="defined twice"):
        module.function("twice", [])
    with pytest.raises(CompileError, match="different contents"):
        module.table("numbers", "i64", [1])


def test_atomics() -> None:
    out = np.array([5, 0, 0, 0], np.int64)

    def build(f: Function, p: Value) -> None:
        before = f.atomic_rmw("add", p, constant("i64", 3))
        f.atomic_store(before, f.gep(p, 1, "i64"))
        f.fence()
        f.pause()
        f.store(f.atomic_load("i64", p), f.gep(p, 2, "i64"))
        old, swapped = f.compare_exchange(p, constant("i64", 8), constant("i64", 1))
        f.store(f.add(old, f.zext(swapped, "i64")), f.gep(p, 3, "i64"))

    run(HOST, build, out)
    assert out.tolist() == [1, 5, 8, 9]


# ---- memory


@every_target
@pytest.mark.parametrize("element", ["float", "double", "i32", "i8", "half"])
def test_masked_memory_touches_no_more_than_it_may(target: Target, element: str) -> None:
    dtype = {"float": np.float32, "double": np.float64, "i32": np.int32, "i8": np.int8, "half": np.float16}[
        element
    ]
    lanes = target.vector_bytes // np.dtype(dtype).itemsize
    type_ = vector(element, lanes)
    for n in (0, 1, lanes - 1, lanes, lanes + 3):
        source = np.arange(1, 2 * lanes + 1).astype(dtype)
        out = np.zeros(2 * lanes, dtype)

        def build(
            f: Function, x: Value, y: Value, count: Value, type_: str = type_, lanes: int = lanes
        ) -> None:
            mask = f.lanes(count, lanes)
            f.masked_store(f.masked_load(type_, x, mask, other=0), y, mask)

        run(target, build, source, out, n)
        kept = min(n, lanes)
        assert (out[:kept] == source[:kept]).all() and (out[kept:] == 0).all()


@every_target
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_lane_masks_of_any_width(target: Target, lanes: int) -> None:
    for n in range(lanes + 2):
        out = np.zeros(lanes, np.int32)

        def build(f: Function, p: Value, count: Value, n: int = n) -> None:
            mask = f.lanes(count, lanes)
            f.store(f.zext(f.value(f.and_(mask, f.lanes(n, lanes))), "i32"), p)

        run(target, build, out, n)
        assert out.tolist() == [int(i < n) for i in range(lanes)]


@every_target
def test_gather_and_scatter(target: Target) -> None:
    lanes = target.lanes("f32")
    source = np.arange(100, dtype=np.float32)
    index = np.array([(7 * i + 3) % 50 for i in range(lanes)], np.int32)
    out, spread = np.zeros(lanes, np.float32), np.zeros(100, np.float32)

    def build(f: Function, x: Value, i: Value, y: Value, s: Value) -> None:
        indices = f.load(vector("i32", lanes), i)
        mask = f.lanes(lanes - 1, lanes)
        f.store(f.gather(x, indices, "float", mask, other=-1.0), y)
        f.scatter(f.gather(x, indices, "float"), s, f.sext(indices, "i64"), mask)

    run(target, build, source, index, out, spread)
    assert out.tolist() == [*source[index[:-1]], -1.0]
    wanted = np.zeros(100, np.float32)
    wanted[index[:-1]] = source[index[:-1]]
    assert (spread == wanted).all()


@every_target
def test_nontemporal_store_and_prefetch(target: Target) -> None:
    lanes = target.lanes("f32")
    raw = np.zeros(3 * lanes, np.float32)
    start = -raw.ctypes.data % target.vector_bytes // 4
    out = raw[start : start + lanes]

    def build(f: Function, p: Value) -> None:
        f.prefetch(p)
        f.store(f.splat(2.5, lanes), p, nontemporal=True)
        f.fence()

    run(target, build, out)
    assert (out == 2.5).all()


# ---- floats and lanes


@every_target
def test_transpose_and_reductions(target: Target) -> None:
    lanes = target.lanes("f32")
    type_ = vector("float", lanes)
    rng = np.random.default_rng(1)
    square = rng.standard_normal((lanes, lanes)).astype(np.float32)
    out, sums = np.zeros_like(square), np.zeros(2, np.float32)

    def build(f: Function, x: Value, y: Value, s: Value) -> None:
        rows = [f.load(type_, f.gep(x, i * lanes, "float")) for i in range(lanes)]
        for i, row in enumerate(f.transpose(rows)):
            f.store(row, f.gep(y, i * lanes, "float"))
        f.store(f.reduce_add(rows[0]), s)
        f.store(f.reduce(f.fmax, rows[0]), f.gep(s, 1, "float"))

    run(target, build, square, out, sums)
    assert (out == square.T).all()
    tree = square[0].copy()
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    assert sums[0] == tree[0] and sums[1] == square[0].max()


@every_target
def test_fma_rounds_once_only_where_there_is_fma(target: Target) -> None:
    a, c = np.float32(1 + 2**-12), np.float32(-1)
    out = np.array([a, a, c], np.float32)

    def build(f: Function, p: Value) -> None:
        x, y, z = (f.load("float", f.gep(p, i, "float")) for i in range(3))
        f.store(f.fma(x, y, z), p)

    run(target, build, out)
    once, twice = np.float32(float(a) * float(a) - 1), np.float32(a * a) + c
    assert out[0] == (once if target.has_fma else twice) and once != twice


SPECIAL = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    0.49999997,
    -0.3,
    8388607.5,
    8388609.0,
    1e30,
    np.inf,
    -np.inf,
    np.nan,
]


@every_target
@pytest.mark.parametrize("element", ["float", "double"])
def test_rounding_minimum_and_maximum(target: Target, element: str) -> None:
    dtype = np.float32 if element == "float" else np.float64
    x = np.array(np.meshgrid(SPECIAL, SPECIAL)[0].ravel(), dtype)
    y = np.array(np.meshgrid(SPECIAL, SPECIAL)[1].ravel(), dtype)
    out = np.zeros((8, x.size), dtype)

    def build(f: Function, p: Value, q: Value, o: Value) -> None:
        def body(i: Any, carried: list[Value]) -> None:
            a, b = f.load(element, f.gep(p, i, element)), f.load(element, f.gep(q, i, element))
            results = [f.floor(a), f.ceil(a), f.trunc_float(a), f.round_even(a), f.fmin(a, b), f.fmax(a, b)]
            results += [f.fmin_x86(a, b), f.fmax_x86(a, b)]
            for row, result in enumerate(results):
                f.store(result, f.gep(o, f.add(i, row * x.size), element))

        f.loop(0, x.size, 1, [], body)

    run(target, build, x, y, out)
    with np.errstate(invalid="ignore"):
        wanted = [np.floor(x), np.ceil(x), np.trunc(x), np.rint(x), np.minimum(x, y), np.maximum(x, y)]
        wanted += [np.where(x < y, x, y), np.where(x > y, x, y)]
    for row, (have, want) in enumerate(zip(out, wanted, strict=True)):
        np.testing.assert_array_equal(have, want)
        if row < 4:
            assert (np.signbit(have) == np.signbit(want)).all()


Build = Callable[[Function, Value], Value]


def convert(target: Target, x: Any, out: Any, build: Build, source: str, lanes: int) -> Any:
    """`build` of every element of `x`, `lanes` at a time, into `out`."""

    def body(f: Function, p: Value, q: Value) -> None:
        def step(i: Any, carried: list[Value]) -> None:
            y = build(f, f.load(vector(source, lanes), f.gep(p, i, source)))
            f.store(y, f.gep(q, i, y.element))

        f.loop(0, x.size, lanes, [], step)

    run(target, body, x, out)
    return out


@every_target
@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize(("element", "dtype"), [("half", np.float16), ("bfloat", ml_dtypes.bfloat16)])
def test_sixteen_bit_floats_convert_exactly(target: Target, lanes: int, element: str, dtype: Any) -> None:
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    wide = convert(
        target, every, np.zeros(65536, np.float32), lambda f, v: f.fpext(v, "float"), element, lanes
    )
    np.testing.assert_array_equal(wide, every.astype(np.float32))

    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        middles = (every.astype(np.float64)[:-1] + every.astype(np.float64)[1:]) / 2
        near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
        single = np.concatenate([words, near.astype(np.float32)])
        single = np.resize(single, single.size // 16 * 16)
        double = np.resize(np.concatenate([near, rng.standard_normal(1000) * 1e-6]), near.size // 16 * 16)
        for x, source in ((single, "float"), (double, "double")):
            if source == "double" and dtype is not np.float16:
                continue  # ml_dtypes goes through f32 and rounds twice: no reference
            have = convert(
                target, x, np.zeros(x.size, dtype), lambda f, v: f.fptrunc(v, element), source, lanes
            )
            want = x.astype(dtype)
            same = have.view(np.uint16) == want.view(np.uint16)
            assert (same | (np.isnan(have) & np.isnan(want))).all()


@every_target
def test_no_conversion_calls_a_library(target: Target) -> None:
    module = Module(target)
    f = module.function("f", [("ptr", "p"), ("<8 x float>", "x"), ("<8 x double>", "y"), ("<8 x half>", "h")])
    p, x, y, h = f.args
    for v in (f.fptrunc(x, "half"), f.fptrunc(y, "half"), f.fptrunc(y, "bfloat"), f.fptrunc(x, "bfloat")):
        f.store(v, p)
    f.store(f.fpext(h, "double"), p)
    f.store(f.fma(x, f.round_even(x), f.fpext(h, "float")), p)
    f.store(f.uitofp(f.fptoui(y, "i64"), "float"), p)
    assert jit.undefined_symbols(jit.compile_object(module.text(), target)) == ()


def test_integer_and_float_casts() -> None:
    x = np.array([-3.7, 3.7, 0.0, 1e6], np.float32)
    out = np.zeros(4, np.int32)
    convert(HOST, x, out, lambda f, v: f.fptosi(v, "i32"), "float", 4)
    assert out.tolist() == [-3, 3, 0, 1_000_000]
    small = np.array([-1, 127, -128, 5], np.int8)
    signed = convert(HOST, small, np.zeros(4, np.float32), lambda f, v: f.sitofp(v, "float"), "i8", 4)
    unsigned = convert(HOST, small, np.zeros(4, np.float32), lambda f, v: f.uitofp(v, "float"), "i8", 4)
    assert signed.tolist() == [-1, 127, -128, 5] and unsigned.tolist() == [255, 127, 128, 5]


def test_insert_extract_shuffle() -> None:
    out = np.zeros(8, np.float32)

    def build(f: Function, p: Value) -> None:
        v = lanes_of("<4 x float>", [0.0, 1.0, 2.0, 3.0])
        w = f.insert(v, f.extract(v, 3), 0)
        f.store(f.concat(w, f.shuffle(v, w, [4, 1, 7, 2])), p)

    run(HOST, build, out)
    assert out.tolist() == [3, 1, 2, 3, 3, 1, 3, 2]


def test_low_precision_dot_products() -> None:
    if not (HOST.has_bf16 and HOST.has_vnni):
        pytest.skip("this machine has no bf16 or VNNI instructions")
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 255, 64).astype(np.uint8), rng.integers(-128, 127, 64).astype(np.int8)
    x, y = (rng.standard_normal(32).astype(ml_dtypes.bfloat16) for _ in range(2))
    counts, sums = np.zeros(16, np.int32), np.zeros(16, np.float32)

    def build(f: Function, p: Value, q: Value, c: Value, u: Value, v: Value, s: Value) -> None:
        bytes_, pairs = "<64 x i8>", "<32 x bfloat>"
        f.store(f.dot_u8i8(constant("<16 x i32>", 1), f.load(bytes_, p), f.load(bytes_, q)), c)
        f.store(f.dot_bf16(constant("<16 x float>", 1.0), f.load(pairs, u), f.load(pairs, v)), s)

    run(HOST, build, a, b, counts, x, y, sums)
    assert (counts == 1 + (a.astype(np.int32) * b).reshape(16, 4).sum(1)).all()
    np.testing.assert_allclose(sums, 1 + (x.astype(float) * y.astype(float)).reshape(16, 2).sum(1), rtol=1e-5)


def test_text_is_deterministic_and_has_the_target_attributes() -> None:
    def text() -> str:
        f = Module(resolve("x86-64-v4")).function("f", [("ptr noalias", "p"), ("i64", "n")])
        f.loop(0, f.args[1], 1, [], lambda i, c: f.store(f.floor(constant("<16 x float>", 0.5)), f.args[0]))
        return f.module.text()

    assert text() == text()
    assert '"prefer-vector-width"="512"' in text() and "+avx512f" in text() and "ptr noalias %p" in text()
