"""Kernels of matrix products under test: operands against guard pages, products of random numbers."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from machines import executable, on_targets
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.product.gemm import Epilogue, GemmSpec, emit_gemm
from rlx.codegen.cpu.product.packing import pack_weights
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.ir.dim import evaluate, sym
from rlx.ir.graph import Graph
from rlx.target.cpu import Target, resolve
from rlx.target.cpuid import MATRICES

Array = NDArray[Any]
HOST = resolve("host")
TARGETS = executable()
EPS = {"f32": 2.0**-23, "f64": 2.0**-52, "bf16": 2.0**-8, "f16": 2.0**-10}
NUMPY = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
SUMS = {"f64": np.float64, "i8": np.int32, "u8": np.int32}
C_DTYPE = {"f64": "f64", "i8": "i32", "u8": "i32"}
FILLER = 7

every_target = on_targets(TARGETS)


def _as_for_f32(target: Target) -> Target:
    """The target without what only narrow types make use of."""
    narrow = {"avx512bf16", "avx512vnni", "avxvnni", *MATRICES}
    wide = tuple(f for f in target.features if f not in narrow)
    emulated = target.emulated and wide != target.code.features
    return replace(target, name="", features=wide, emulated=emulated, tiles=(("f32", target.tile("f32")),))


# Where targets differ in nothing else, the code of f32 is the same; tests that rely on it assert it.
F32_TARGETS = list({_as_for_f32(target): target for target in TARGETS}.values())
every_f32_target = on_targets(F32_TARGETS)


def code_of(graph: Graph, target: Target) -> str:
    """LLVM IR of a whole program."""
    lir = plan(graph, target=target.name)
    return "".join(build_kernels(lir, target).texts)


def assert_f32_targets_stand_for_all(text_of: Callable[[Target], str]) -> None:
    """Code for any target is the code for one of these, but for the lines that name its instruction set."""
    code = {t.name: re.sub(r"(?m)^attributes #0 = .*$", "", text_of(t)) for t in TARGETS}
    assert set(code.values()) == {code[t.name] for t in F32_TARGETS}


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
    """A compiled kernel with the sizes it takes: symbols by name, or what is computed of them."""

    code: jit.Code
    names: Sequence[Any]
    scratch: Any
    call: Any = field(init=False)

    def __post_init__(self) -> None:
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.call = ctypes.CFUNCTYPE(None, *types)(self.code.address("kernel"))

    def run(self, arrays: Sequence[Array], sizes: dict[str, int], threads: int = 1) -> None:
        """Run every thread's part, the last thread first: parts must not depend on each other."""
        guard = Guarded()
        per_thread = -(-evaluate(self.scratch, sizes) // 64) * 64
        scratch = guard.array((threads * per_thread,), np.uint8, at_end=True)
        pointers = [array.ctypes.data for array in arrays]
        values = (sizes[x] if isinstance(x, str) else evaluate(x, sizes) for x in self.names)
        fields = [0, scratch.ctypes.data, per_thread, *pointers, *values]
        table = np.array(fields, np.int64)
        for thread in reversed(range(threads)):
            self.call(table.ctypes.data, thread, threads, 0)


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
    fields: dict[str, Any] = dict(zip(names, names, strict=True))

    def dim_value(fn: Function, expr: Any) -> Int:
        fields.setdefault(str(expr), expr)
        return fn.field(fn.args[0], 3 + operands + list(fields).index(str(expr)))

    info = emit_gemm(
        module,
        "kernel",
        spec,
        operands=(3, 4, 2 + operands),
        epilogue=epilogue,
        heavy=heavy,
        dim_value=dim_value,
    )
    code = jit.compile_and_load(module.text(), target)
    return Kernel(code, tuple(fields.values()), info.scratch_bytes_per_thread)


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
