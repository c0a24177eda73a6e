"""The GEMM kernels against NumPy in f64, with operands against guard pages."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from gemm_harness import (
    EPS,
    HOST,
    TARGETS,
    Array,
    Guarded,
    Kernel,
    assert_f32_targets_stand_for_all,
    assert_product,
    build,
    every_f32_target,
    every_target,
    random,
    run_strided,
    run_weights,
    strided_kernel,
    tolerance,
    weight_kernel,
)
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.product.gemm import GemmSpec, emit_gemm
from rlx.codegen.cpu.product.packing import pack_weights
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, lanes_of
from rlx.errors import DTypeError, ShapeError, UnsupportedError
from rlx.ir.dim import sym
from rlx.target.cpu import Target, resolve

# ---- products


@every_f32_target
@pytest.mark.parametrize(
    ("k", "n"), [(0, 5), (1, 1), (7, 5), (33, 50), (64, 48), (40, 16), (100, 1001), (384, 384)]
)
def test_weights_of_every_row_count(target: Target, k: int, n: int) -> None:
    for m in (0, 1, 2, 3, 4, 7, 8, 9, 17, 129):
        c, a, w = run_weights(target, m, k, n)
        assert_product(c, a, w)


@every_f32_target
@pytest.mark.parametrize("transposed", ["", "b", "a", "ab", "g"])
def test_strided_products(target: Target, transposed: str) -> None:
    shapes = [
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 17, 48, 64),
        (2, 33, 101, 37),
        (1, 1, 333, 77),
        (1, 2, 333, 77),
        (2, 0, 3, 3),
        (2, 3, 0, 3),
        (2, 3, 3, 0),
        (0, 3, 3, 3),
        (1, 8, 400, 5),
        (1, 170, 100, 40),
    ]
    for (batch, m, n, k), gap in itertools.product(shapes, (0, 3)):
        c, a, b = run_strided(target, batch, m, n, k, transposed, gap=gap)
        assert_product(c, a, b)


@every_f32_target
@pytest.mark.parametrize("transposed", ["", "b", "a"])
def test_deep_products_in_blocks(target: Target, transposed: str) -> None:
    c, a, b = run_strided(target, 1, 161, 197, 2500, transposed)
    assert_product(c, a, b)


@every_f32_target
def test_deep_products_of_columns_with_packed_weights(target: Target) -> None:
    k, n = 2500, 197
    spec = GemmSpec(sym("m"), n, k, (1, sym("m")), (), (n, 1), b_packed=True)
    kernel = build(target, spec, ("m",))
    w = random((k, n), seed=2)
    packed = pack_weights(w, target)
    for m in (1, 2, 7, 8, 33, 161):
        guard = Guarded()
        a = random((k, m), seed=1)
        c = guard.array((m, n), np.float32, at_end=True)
        kernel.run([guard.copy(a, True), guard.copy(packed, True), c], {"m": m}, threads=2)
        assert_product(c, a.T, w)


@settings(max_examples=60)
@given(
    batch=st.integers(0, 3),
    m=st.integers(0, 40),
    n=st.integers(0, 120),
    k=st.integers(0, 80),
    gap=st.integers(0, 5),
    transposed=st.sampled_from(["", "b", "a", "ab", "g"]),
    threads=st.integers(1, 5),
    at_end=st.booleans(),
    target=st.sampled_from(TARGETS),
    heavy=st.booleans(),
)
def test_any_shape(
    batch: int,
    m: int,
    n: int,
    k: int,
    gap: int,
    transposed: str,
    threads: int,
    at_end: bool,
    target: Target,
    heavy: bool,
) -> None:
    c, a, b = run_strided(
        target, batch, m, n, k, transposed, threads=threads, gap=gap, at_end=at_end, heavy=heavy
    )
    assert_product(c, a, b)


@every_f32_target
def test_static_sizes(target: Target) -> None:
    for m, n, k in (
        (1, 1, 1),
        (1, 200, 9),
        (2, 200, 9),
        (3, 77, 13),
        (8, 48, 5),
        (13, 33, 20),
        (40, 64, 7),
        (0, 4, 4),
    ):
        guard = Guarded()
        a, b = random((m, k), seed=1), random((k, n), seed=2)
        c = guard.array((m, n), np.float32, at_end=True)
        spec = GemmSpec(m, n, k, a_strides=(k, 1), b_strides=(n, 1), c_strides=(n, 1))
        build(target, spec).run([guard.copy(a, True), guard.copy(b, True), c], {}, threads=2)
        assert_product(c, a, b)


@every_f32_target
@pytest.mark.parametrize(("m", "n"), [("m", 1), ("m", 2), ("m", 8), (1, "n"), (3, "n"), (2, 5)])
def test_few_columns_or_rows_along_k(target: Target, m: Any, n: Any) -> None:
    """Both operands contiguous along k: rows of A, columns of B."""
    rows, columns = (sym(x) if isinstance(x, str) else x for x in (m, n))
    names = tuple(x for x in (m, n, "k") if isinstance(x, str))
    k = sym("k")
    spec = GemmSpec(
        rows, columns, k, (sym("sa"), k, 1), (sym("sb"), 1, k), (sym("sc"), sym("ldc"), 1), batch=(2,)
    )
    names = (*names, "sa", "sb", "sc", "ldc")
    kernel = build(target, spec, names, epilogue=add_column)
    for size, depth, threads in itertools.product((0, 1, 4, 9, 21), (0, 1, 16, 37), (1, 3)):
        guard = Guarded()
        here, there = size if isinstance(m, str) else m, size if isinstance(n, str) else n
        a, b = random((2, here, depth), seed=1), random((2, there, depth), seed=2)
        c = guard.array((2, here, there), np.float32, at_end=True)
        sizes = {
            "m": here,
            "n": there,
            "k": depth,
            "sa": here * depth,
            "sb": there * depth,
            "sc": here * there,
            "ldc": there,
        }
        kernel.run([guard.copy(a, True), guard.copy(b, True), c], sizes, threads)
        wanted = np.arange(there) + a.astype(np.float64) @ b.transpose(0, 2, 1)
        slack = tolerance(a, b.transpose(0, 2, 1), "f32") + 2 * EPS["f32"] * np.arange(there) + 1e-6
        assert (np.abs(c - wanted) <= slack).all()


def add_column(
    fn: Function, sums: Value, row: Int, column: Int, mask: Value | None, batch: tuple[Int, ...]
) -> Value:
    first = fn.splat(fn.sitofp(fn.value(column), "float"), sums.width)
    return fn.fadd(sums, fn.fadd(first, lanes_of(sums.type, [float(i) for i in range(sums.width)])))


# ---- bits


@pytest.mark.parametrize(("k", "n"), [(100, 200), (383, 129)])
def test_bits_of_a_row_depend_on_nothing_else(k: int, n: int) -> None:
    rows = random((129, k), seed=1)
    packed = pack_weights(random((k, n), seed=2), HOST)
    kernel = weight_kernel(HOST, k, n)

    def product(a: Array, threads: int) -> Array:
        c = np.empty((len(a), n), np.float32)
        kernel.run([np.ascontiguousarray(a), packed, c], {"m": len(a)}, threads)
        return c

    wanted = product(rows, 1)
    for threads in (2, 3, 7):
        assert (product(rows, threads) == wanted).all()
    for first, stop in ((0, 1), (5, 7), (100, 103), (128, 129), (3, 12), (0, 17)):
        assert (product(rows[first:stop], 2) == wanted[first:stop]).all()


def test_bits_do_not_depend_on_layout() -> None:
    m, n, k = 170, 210, 2100  # packs B, packs A when stored by columns, and cuts k
    wanted = run_weights(HOST, m, k, n)[0]
    a, w = random((m, k), seed=1), random((k, n), seed=2)
    stored = {"": (a, w), "b": (a, w.T), "a": (a.T, w), "ab": (a.T, w.T)}
    for transposed, (x, y) in stored.items():
        x, y, c = np.ascontiguousarray(x), np.ascontiguousarray(y), np.empty((m, n), np.float32)
        sizes = {
            "batch": 1,
            "m": m,
            "n": n,
            "k": k,
            "sa": 0,
            "lda": x.shape[1],
            "sb": 0,
            "ldb": y.shape[1],
            "sc": 0,
            "ldc": n,
        }
        for threads in (1, 3):
            strided_kernel(HOST, transposed).run([x, y, c], sizes, threads)
            assert (c == wanted).all(), (transposed, threads)


# ---- epilogues


def affine_epilogue(
    fn: Function, sums: Value, row: Int, column: Int, mask: Value | None, batch: tuple[Int, ...]
) -> Value:
    """relu(sums + bias[column] + residual[batch, row, column] * (row + 1)); fields: 5, 6, n at 8, m at 9."""
    table = fn.args[0]
    m, n = fn.field(table, 9), fn.field(table, 8)
    index = fn.add(fn.mul(fn.add(fn.mul(batch[0], m), row), n), column)

    def load(field_: int, at: Int) -> Value:
        place = fn.gep(fn.field(table, field_, "ptr"), at, "float")
        return fn.load(sums.type, place) if mask is None else fn.masked_load(sums.type, place, mask)

    factor = fn.splat(fn.sitofp(fn.add(row, 1), "float"), sums.width)
    total = fn.fma(load(6, index), factor, fn.fadd(sums, load(5, column)))
    return fn.fmax_x86(total, constant(sums.type, 0.0))


@every_f32_target
@pytest.mark.parametrize("heavy", [False, True])
def test_epilogue_sees_rows_columns_and_batch(target: Target, heavy: bool) -> None:
    m, n, k = sym("m"), sym("n"), 24
    spec = GemmSpec(m, n, k, (m * k, k, 1), (n * k, n, 1), (m * n, n, 1), batch=(3,))
    module = Module(target)

    def dim_value(fn: Function, expr: Any) -> Int:
        values = {"n": fn.field(fn.args[0], 8), "m": fn.field(fn.args[0], 9)}
        factors = re.findall(r"\d+|[mn]", str(expr))
        return functools.reduce(fn.mul, (int(f) if f.isdigit() else values[f] for f in factors))

    info = emit_gemm(
        module, "kernel", spec, operands=(3, 4, 7), epilogue=affine_epilogue, heavy=heavy, dim_value=dim_value
    )
    kernel = Kernel(jit.compile_and_load(module.text(), target), ("n", "m"), info.scratch_bytes_per_thread)
    for rows, columns in ((1, 200), (2, 100), (9, 33), (8, 48)):
        guard = Guarded()
        a, b = random((3, rows, k), seed=1), random((3, k, columns), seed=2)
        bias, residual = random((columns,), seed=3), random((3, rows, columns), seed=4)
        c = guard.array((3, rows, columns), np.float32, at_end=True)
        operands = [guard.copy(x, at_end=True) for x in (a, b, bias, residual)]
        kernel.run([*operands, c], {"n": columns, "m": rows}, threads=2)
        scale = np.arange(1, rows + 1)[:, None]
        wanted = np.maximum(a.astype(np.float64) @ b + bias + residual * scale, 0)
        slack = tolerance(a, b, "f32") + 4 * EPS["f32"] * (np.abs(bias) + np.abs(residual) * scale)
        assert (np.abs(c - wanted) <= slack).all()


def test_epilogue_may_read_what_it_overwrites() -> None:
    """C += A @ B in place, deep enough that k would be cut if C could hold sums."""
    m, n, k = 200, 100, 1500

    def add_c(
        fn: Function, sums: Value, row: Int, column: Int, mask: Value | None, batch: tuple[Int, ...]
    ) -> Value:
        place = fn.gep(fn.field(fn.args[0], 5, "ptr"), fn.add(fn.mul(row, n), column), "float")
        before = fn.load(sums.type, place) if mask is None else fn.masked_load(sums.type, place, mask)
        return fn.fadd(before, sums)

    kernel = build(HOST, GemmSpec(m, n, k, (k, 1), (n, 1), (n, 1)), epilogue=add_c)
    a, b, c = random((m, k), seed=1), random((k, n), seed=2), random((m, n), seed=3)
    before = c.copy()
    kernel.run([a, b, c], {})
    assert (np.abs(c - (a.astype(np.float64) @ b + before)) <= tolerance(a, b, "f32") + 1e-5).all()


@every_target
def test_output_is_rounded_to_the_dtype_of_c(target: Target) -> None:
    spec = GemmSpec(5, 37, 8, (8, 1), (37, 1), (37, 1), c_dtype="bf16")
    a, b = random((5, 8), seed=1), random((8, 37), seed=2)
    c = np.zeros((5, 37), ml_dtypes.bfloat16)
    build(target, spec).run([a, b, c], {})
    assert (np.abs(c.astype(np.float64) - a.astype(np.float64) @ b) <= tolerance(a, b, "bf16")).all()


# ---- weights, code and refusals


def test_one_object_serves_every_row_count() -> None:
    run_weights(HOST, 1, 64, 48)
    before = jit.llvm_compiles
    for m in range(1, 20):
        run_weights(HOST, m, 64, 48)
    assert jit.llvm_compiles == before


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("packed", [True, False])
def test_accumulators_stay_in_registers(target: str, packed: bool) -> None:
    k, n = 384, 1536
    spec = GemmSpec(sym("m"), n, k, (k, 1), () if packed else (n, 1), (n, 1), b_packed=packed)
    module = Module(resolve(target))
    emit_gemm(module, "kernel", spec, dim_value=lambda fn, _: fn.field(fn.args[0], 6))
    text = jit.assembly(module.text(), resolve(target))
    loops = [block for block in text.split("\n.LBB") if "vfmadd" in block or "mulps" in block]
    assert loops
    assert not [
        line for block in loops for line in block.splitlines() if re.search(r"[xyz]mm.*\(%rsp\)", line)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_code_of_f32_needs_no_instructions_for_narrow_types(packed: bool) -> None:
    def text_of(target: Target) -> str:
        module, rows = Module(target), sym("m")
        spec = GemmSpec(rows, 101, 64, (64, 1), () if packed else (101, 1), (101, 1), b_packed=packed)
        emit_gemm(module, "kernel", spec, dim_value=lambda fn, _: fn.field(fn.args[0], 6))
        return module.text()

    assert_f32_targets_stand_for_all(text_of)


def test_assembles_for_aarch64() -> None:
    spec = GemmSpec(sym("m"), 100, 64, (64, 1), (), (100, 1), b_packed=True)
    module = Module(resolve("aarch64"))
    emit_gemm(module, "kernel", spec, dim_value=lambda fn, _: fn.field(fn.args[0], 6))
    assert "fmla" in jit.assembly(module.text(), resolve("aarch64"))


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_dot_products_of_bytes_on_aarch64(dtype: str) -> None:
    """A whole tile is summed by sdot, and its sums stay in registers."""
    g = rlx.Graph("bytes")
    w = g.param("w", (64, 48), "i8", value=np.ones((64, 48), np.int8))
    g.output("y", rlx.ops.matmul_integer(g.input("x", (32, 64), dtype), w))
    target = resolve("aarch64-dotprod")
    texts = build_kernels(plan(g, target=target.name), target).texts
    pieces = [piece for text in texts for piece in jit.assembly(text, target).split("\n.L")]
    loops = [piece.partition("\tb.")[0] for piece in pieces if "sdot" in piece]  # up to their jump back
    rows, vectors = target.tile(dtype)
    most = max(loops, key=lambda piece: piece.count("sdot"))
    assert most.count("sdot") == rows * vectors + (vectors if dtype == "u8" else 0)
    assert "[sp" not in most


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="operand B of a product needs 2 strides, not 1"):
        GemmSpec(1, 1, 1, (1, 1), (1,), (1, 1))
    with pytest.raises(UnsupportedError, match="swap A and B"):
        GemmSpec(4, 4, 4, (4, 1), (4, 1), (1, 4))
    with pytest.raises(ShapeError, match="static size"):
        GemmSpec(4, sym("n"), 4, (4, 1), (), (4, 1), b_packed=True)
    with pytest.raises(ShapeError, match="no dim_value"):
        emit_gemm(Module(HOST), "kernel", GemmSpec(sym("m"), 4, 4, (4, 1), (4, 1), (4, 1)))
    with pytest.raises(DTypeError, match="no contraction kernel takes i32"):
        emit_gemm(Module(HOST), "kernel", GemmSpec(4, 4, 4, (4, 1), (4, 1), (4, 1), dtype="i32"))
    with pytest.raises(ShapeError, match="must be a matrix"):
        pack_weights(np.zeros(3, np.float32), HOST)


@every_target
def test_an_epilogue_that_tells_merged_columns_apart(target: Target) -> None:
    """Pixels are the columns of a 1x1 convolution's product; a row of an image is not one with the next."""
    rng = np.random.default_rng(0)
    x, k, b, y = (
        rng.integers(-3, 4, s).astype("f4") for s in ((1, 16, 3, 3), (5, 16, 1, 1), (3,), (5, 3, 3))
    )
    conv = rlx.ops.conv

    def result(f: Callable[..., rlx.Node], *arrays: np.ndarray) -> np.ndarray:
        g = rlx.Graph("merged")
        g.output("y", f(*(g.input(f"x{i}", a.shape, "f32") for i, a in enumerate(arrays))))
        return rlx.compile(g, target=target.name)(*arrays)

    want = np.einsum("nchw,oc->nohw", x, k[..., 0, 0])
    np.testing.assert_array_equal(result(lambda x, k, b: conv(x, k) + b, x, k, b), want + b)
    rows = result(lambda x, k, b: conv(x, k) * rlx.ops.reshape(b, (3, 1)), x, k, b)
    np.testing.assert_array_equal(rows, want * b[:, None])
    np.testing.assert_array_equal(result(lambda x, k: rlx.ops.triu(conv(x, k)), x, k), np.triu(want))
    turned = result(lambda x, k, y: conv(x, k) + rlx.ops.swapaxes(y, 1, 2), x, k, y)
    np.testing.assert_array_equal(turned, want + y.swapaxes(1, 2))
