"""The GEMM kernels against NumPy in f64, with operands against guard pages."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlx.backend.cpu import jit
from rlx.backend.cpu.gemm import GemmSpec, emit_gemm
from rlx.backend.cpu.gemm_end import Epilogue
from rlx.backend.cpu.irtext import Function, Int, Module, Value, constant, lanes_of
from rlx.backend.cpu.packing import pack_weights, packed_shape, unpack_weights
from rlx.backend.cpu.target import Target, resolve, runs_here, targets
from rlx.errors import DTypeError, ShapeError, UnsupportedError
from rlx.ir.dim import evaluate, sym

Array = NDArray[Any]
HOST = resolve("host")
TARGETS = [target for target in targets() if runs_here(target)]
EPS = {"f32": 2.0**-23, "f64": 2.0**-52, "bf16": 2.0**-8, "f16": 2.0**-10}
NUMPY = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
SUMS = {"f64": np.float64, "i8": np.int32, "u8": np.int32}
C_DTYPE = {"f64": "f64", "i8": "i32", "u8": "i32"}
FILLER = 7

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


# ---- memory whose first and last bytes touch pages that cannot be read


class Guarded:
    """Arrays that end (or begin) at a page without access: one element too far kills the process."""

    def __init__(self) -> None:
        self.regions: list[mmap.mmap] = []

    def array(self, shape: tuple[int, ...], dtype: Any, at_end: bool) -> Array:
        page = mmap.PAGESIZE
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        inside = -(-max(nbytes, 1) // page) * page
        region = mmap.mmap(-1, inside + 2 * page)
        self.regions.append(region)
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        libc = ctypes.CDLL(None, use_errno=True)
        for place in (base, base + page + inside):
            if libc.mprotect(ctypes.c_void_p(place), page, 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        start = page + (inside - nbytes if at_end else 0)
        inside_array: Array = np.frombuffer(region, np.uint8, nbytes, start).view(dtype).reshape(shape)
        return inside_array

    def copy(self, source: Array, at_end: bool) -> Array:
        out = self.array(source.shape, source.dtype, at_end)
        out[...] = source
        return out


# ---- kernels


@dataclass
class Kernel:
    """A compiled kernel with the symbols it takes."""

    code: jit.Code
    names: tuple[str, ...]
    scratch: Any
    call: Any = field(init=False)

    def __post_init__(self) -> None:
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.call = ctypes.CFUNCTYPE(None, *types)(self.code.address("kernel"))

    def run(self, arrays: Sequence[Array], sizes: dict[str, int], threads: int = 1) -> None:
        """Run every thread's part, the last thread first: parts must not depend on each other."""
        guard = Guarded()
        per_thread = -(-evaluate(self.scratch, sizes) // 64) * 64
        scratch = guard.array((threads * per_thread,), np.uint8, at_end=True)
        pointers = [array.ctypes.data for array in arrays]
        fields = [0, scratch.ctypes.data, per_thread, *pointers, *(sizes[name] for name in self.names)]
        table = np.array(fields, np.int64)
        for thread in reversed(range(threads)):
            self.call(table.ctypes.data, thread, threads)


def build(
    target: Target,
    spec: GemmSpec,
    names: tuple[str, ...] = (),
    operands: int = 3,
    epilogue: Epilogue | None = None,
    heavy: bool = False,
) -> Kernel:
    """Compile `spec`; `operands` counts the tensors, of which the last is C, and symbols follow them."""
    module = Module(target)
    info = emit_gemm(
        module,
        "kernel",
        spec,
        operands=(3, 4, 2 + operands),
        epilogue=epilogue,
        heavy=heavy,
        dim_value=lambda fn, expr: fn.field(fn.args[0], 3 + operands + names.index(str(expr))),
    )
    code = jit.compile_and_load(module.text(), target)
    return Kernel(code, names, info.scratch_bytes_per_thread)


@functools.cache
def weight_kernel(target: Target, k: int, n: int, dtype: str = "f32", heavy: bool = False) -> Kernel:
    c_dtype = C_DTYPE.get(dtype, "f32")
    spec = GemmSpec(sym("m"), n, k, (k, 1), (), (n, 1), dtype=dtype, c_dtype=c_dtype, b_packed=True)
    return build(target, spec, ("m",), heavy=heavy)


STRIDED = ("batch", "m", "n", "k", "sa", "lda", "sb", "ldb", "sc", "ldc")


@functools.cache
def strided_kernel(target: Target, transposed: str, dtype: str = "f32", heavy: bool = False) -> Kernel:
    """Everything at run time; `transposed` names operands stored the other way round, "g" a B with a gap."""
    s = {name: sym(name) for name in STRIDED}
    a = (s["sa"], 1, s["lda"]) if "a" in transposed else (s["sa"], s["lda"], 1)
    b = (s["sb"], 1, s["ldb"]) if "b" in transposed else (s["sb"], s["ldb"], 2 if "g" in transposed else 1)
    c_dtype = C_DTYPE.get(dtype, "f32")
    spec = GemmSpec(
        s["m"],
        s["n"],
        s["k"],
        a,
        b,
        (s["sc"], s["ldc"], 1),
        batch=(s["batch"],),
        dtype=dtype,
        c_dtype=c_dtype,
    )
    return build(target, spec, STRIDED, heavy=heavy)


def tolerance(a: Array, b: Array, dtype: str) -> Array:
    """2 K eps sum |a| |b|."""
    k = a.shape[-1]
    bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    return np.asarray(2 * k * EPS[dtype] * bound)


def assert_product(c: Array, a: Array, b: Array, dtype: str = "f32") -> None:
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(c - wanted)
    assert (error <= tolerance(a, b, dtype)).all(), f"off by {error.max()} at {np.argmax(error)}"


def random(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if dtype in ("i8", "u8"):  # all values, the extreme ones often
        low, high = (0, 255) if dtype == "u8" else (-128, 127)
        values = rng.integers(low, high, shape, endpoint=True)
        return np.where(rng.random(shape) < 0.3, rng.choice([low, high], shape), values).astype(
            np.uint8 if dtype == "u8" else np.int8
        )
    return rng.standard_normal(shape).astype(NUMPY[dtype])


def weights(dtype: str) -> str:
    """Dtype of B beside an A of `dtype`."""
    return "i8" if dtype == "u8" else dtype


def run_weights(
    target: Target, m: int, k: int, n: int, threads: int = 1, dtype: str = "f32", heavy: bool = False
) -> tuple[Array, Array, Array]:
    guard = Guarded()
    a, w = random((m, k), dtype, 1), random((k, n), weights(dtype), 2)
    packed = guard.copy(pack_weights(w, target, dtype), at_end=True)
    c = guard.array((m, n), SUMS.get(dtype, np.float32), at_end=True)
    c[...] = FILLER
    weight_kernel(target, k, n, dtype, heavy).run([guard.copy(a, at_end=True), packed, c], {"m": m}, threads)
    return c.copy(), a, w


def run_strided(
    target: Target,
    batch: int,
    m: int,
    n: int,
    k: int,
    transposed: str = "",
    threads: int = 1,
    dtype: str = "f32",
    gap: int = 0,
    at_end: bool = True,
    heavy: bool = False,
) -> tuple[Array, Array, Array]:
    """C, A, B of a batched product; rows are `gap` elements longer than needed."""
    guard = Guarded()
    a = random((batch, k, m + gap) if "a" in transposed else (batch, m, k + gap), dtype, 1)
    if "g" in transposed:
        b = random((batch, k, max(2 * n - 1, 0) + gap), weights(dtype), 2)
    else:
        b = random((batch, n, k + gap) if "b" in transposed else (batch, k, n + gap), weights(dtype), 2)
    c = guard.array((batch, m, n + gap), SUMS.get(dtype, np.float32), at_end)
    c[...] = FILLER
    sizes = {
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "sa": a[:1].size,
        "lda": a.shape[2],
        "sb": b[:1].size,
        "ldb": b.shape[2],
        "sc": c[:1].size,
        "ldc": c.shape[2],
    }
    kernel = strided_kernel(target, transposed, dtype, heavy)
    kernel.run([guard.copy(a, at_end), guard.copy(b, at_end), c], sizes, threads)
    assert (c[:, :, n:] == FILLER).all()
    left = (a.transpose(0, 2, 1) if "a" in transposed else a)[:, :m, :k]
    right = (b.transpose(0, 2, 1) if "b" in transposed else b[:, :, ::2] if "g" in transposed else b)[
        :, :k, :n
    ]
    return c[:, :, :n].copy(), left, right


# ---- products


@every_target
@pytest.mark.parametrize(
    ("k", "n"), [(0, 5), (1, 1), (7, 5), (33, 50), (64, 48), (40, 16), (100, 1001), (384, 384)]
)
def test_weights_of_every_row_count(target: Target, k: int, n: int) -> None:
    for m in (0, 1, 2, 3, 4, 7, 8, 9, 17, 129):
        c, a, w = run_weights(target, m, k, n)
        assert_product(c, a, w)


@every_target
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


@every_target
@pytest.mark.parametrize("transposed", ["", "b", "a"])
def test_deep_products_in_blocks(target: Target, transposed: str) -> None:
    c, a, b = run_strided(target, 1, 161, 197, 2500, transposed)
    assert_product(c, a, b)


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


@every_target
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


@every_target
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


@every_target
def test_f64(target: Target) -> None:
    for m in (1, 5, 12):
        c, a, w = run_weights(target, m, 30, 45, dtype="f64")
        assert_product(c, a, w, "f64")
    for transposed in ("", "a", "b"):
        c, a, b = run_strided(target, 2, 11, 37, 19, transposed, dtype="f64")
        assert_product(c, a, b, "f64")


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


@every_target
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


@every_target
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8"])
@pytest.mark.parametrize(("k", "n"), [(0, 3), (3, 0), (1, 1), (5, 16), (7, 48), (9, 50), (4, 200)])
def test_packed_weights_unpack(target: Target, dtype: str, k: int, n: int) -> None:
    w = random((k, n), dtype)
    packed = pack_weights(w, target, dtype)
    assert packed.shape == packed_shape(k, n, target, dtype)
    assert (unpack_weights(packed, k, n, target, dtype) == w).all()


def test_one_object_serves_every_row_count() -> None:
    weight_kernel(HOST, 64, 48)
    before = jit.llvm_compiles
    for m in range(1, 20):
        run_weights(HOST, m, 64, 48)
    assert jit.llvm_compiles == before


@every_target
@pytest.mark.parametrize("packed", [True, False])
def test_accumulators_stay_in_registers(target: Target, packed: bool) -> None:
    k, n = 384, 1536
    spec = GemmSpec(sym("m"), n, k, (k, 1), () if packed else (n, 1), (n, 1), b_packed=packed)
    module = Module(target)
    emit_gemm(module, "kernel", spec, dim_value=lambda fn, _: fn.field(fn.args[0], 6))
    text = jit.assembly(module.text(), target)
    loops = [block for block in text.split("\n.LBB") if "vfmadd" in block or "mulps" in block]
    assert loops
    assert not [
        line for block in loops for line in block.splitlines() if re.search(r"[xyz]mm.*\(%rsp\)", line)
    ]


def test_assembles_for_aarch64() -> None:
    spec = GemmSpec(sym("m"), 100, 64, (64, 1), (), (100, 1), b_packed=True)
    module = Module(resolve("aarch64"))
    emit_gemm(module, "kernel", spec, dim_value=lambda fn, _: fn.field(fn.args[0], 6))
    assert "fmla" in jit.assembly(module.text(), resolve("aarch64"))


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
    with pytest.raises(ShapeError, match="have 64 elements"):
        unpack_weights(np.zeros(3, np.float32), 4, 4, resolve("x86-64-v4"))


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
