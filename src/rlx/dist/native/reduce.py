"""Reduction kernels: n arrays -> one result, written to m places, always combined in the order of the ranks.

One kernel per dtype and kind serves any number of ranks, because the pointers stand in a table. Each block
of elements is held in registers while the ranks' values are folded in, so memory is read once and written
once. The order of the additions for one element is r0, r1, r2 ... whatever the block, which makes results
bitwise equal wherever and in whatever pieces they are computed.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from rlx.records import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dist.native.sync import load_cached
from rlx.dist.types import ReduceKind
from rlx.errors import DTypeError

if TYPE_CHECKING:
    from rlx.codegen.native.irtext import Function
    from rlx.codegen.native.irtypes import Value
    from rlx.target.cpu import Target

UNROLL = 4
# From this many bytes of results on, stores go past the caches: the lines would be evicted before they are
# read.
STREAM_BYTES = 16 << 20
VECTOR_ALIGN = 64

_STORAGE = {"f64": "double", "f32": "float", "f16": "half", "bf16": "bfloat", "bool": "i8"}


@dataclass(frozen=True)
class _Plan:
    """How one dtype is reduced: its type in memory, the type it is computed in, the kind of step."""

    stored: str
    computed: str
    signed: bool
    kind: ReduceKind

    @property
    def lanes_bytes(self) -> int:
        from rlx.codegen.native.irtypes import size_bytes

        return max(size_bytes(self.computed), size_bytes(self.stored))


def _plan(dtype: str, kind: ReduceKind) -> _Plan:
    stored = _STORAGE.get(dtype) or f"i{dtype[1:]}"
    computed = stored
    if dtype in ("f16", "bf16"):
        computed = "float"
    elif kind is ReduceKind.MEAN and dtype in ("i8", "i16", "i32", "u8", "u16", "u32"):
        computed = "double"  # exact: the sum of fewer than 2**20 values of 32 bits fits its 53 bits
    if dtype == "bool":  # as NumPy adds and multiplies truth values: or, and
        kind = {ReduceKind.SUM: ReduceKind.MAX, ReduceKind.PROD: ReduceKind.MIN}.get(kind, kind)
    return _Plan(stored, computed, dtype.startswith("i"), kind)


class _Emitter:
    """Writes the body of a kernel for one plan; values may be scalars or vectors."""

    def __init__(self, f: Function, plan: _Plan, ranks: Value) -> None:
        self.f, self.plan, self.ranks = f, plan, ranks
        self.is_float = plan.computed in ("float", "double")
        # 64-bit integers have nothing wider: quotients and remainders are summed apart, which cannot
        # overflow.
        self.split_mean = plan.kind is ReduceKind.MEAN and not self.is_float

    def widen(self, x: Value) -> Value:
        f, plan = self.f, self.plan
        if plan.stored == plan.computed:
            return x
        if plan.stored in ("half", "bfloat"):
            return f.fpext(x, plan.computed)
        return f.sitofp(x, plan.computed) if plan.signed else f.uitofp(x, plan.computed)

    def narrow(self, x: Value) -> Value:
        f, plan = self.f, self.plan
        if plan.stored == plan.computed:
            return x
        if plan.stored in ("half", "bfloat"):
            return f.fptrunc(x, plan.stored)
        whole = f.fptosi(x, "i64")  # the mean of integers is in their range, and i64 holds that of u32
        return f.trunc(whole, plan.stored)

    def first(self, x: Value) -> list[Value]:
        return self._quotient_and_rest(x) if self.split_mean else [x]

    def fold(self, total: list[Value], x: Value) -> list[Value]:
        if self.split_mean:
            quotient, rest = self._quotient_and_rest(x)
            return [self.f.value(self.f.add(total[0], quotient)), self.f.value(self.f.add(total[1], rest))]
        return [self._step(total[0], x)]

    def finish(self, total: list[Value]) -> Value:
        f = self.f
        if self.split_mean:
            extra = f.udiv(total[1], self._count(total[1]))
            return f.value(f.add(total[0], extra))
        if self.plan.kind is not ReduceKind.MEAN:
            return total[0]
        mean = self._divided(total[0])
        return f.floor(mean) if self.plan.stored.startswith("i") else mean

    def _divided(self, total: Value) -> Value:
        """The total over the number of ranks; for powers of two a product, as exact and much faster."""
        f = self.f
        bits = f.and_(self.ranks, f.sub(self.ranks, 1))
        count = self._count(total)
        inverse = f.splat(f.fdiv(f.value(1.0, self.plan.computed), f.extract(count, 0)), total.width)
        exact, other = lambda: [f.fmul(total, inverse)], lambda: [f.fdiv(total, count)]
        return f.if_value(f.cmp("eq", bits, 0), exact, other)[0]

    def _count(self, like: Value) -> Value:
        f = self.f
        count = f.sitofp(self.ranks, self.plan.computed) if self.is_float else self.ranks
        return f.splat(count, like.width)

    def _quotient_and_rest(self, x: Value) -> list[Value]:
        """Floor division of 64-bit integers by the number of ranks."""
        f, count = self.f, self._count(x)
        if not self.plan.signed:
            return [f.value(f.udiv(x, count)), f.value(f.urem(x, count))]
        quotient, rest = f.value(f.sdiv(x, count)), f.value(f.srem(x, count))
        below = f.value(f.cmp("slt", rest, 0))
        return [f.select(below, f.sub(quotient, 1), quotient), f.select(below, f.add(rest, count), rest)]

    def _step(self, total: Value, x: Value) -> Value:
        f, kind = self.f, self.plan.kind
        if kind in (ReduceKind.SUM, ReduceKind.MEAN):
            return f.fadd(total, x) if self.is_float else f.value(f.add(total, x))
        if kind is ReduceKind.PROD:
            return f.fmul(total, x) if self.is_float else f.value(f.mul(total, x))
        if self.is_float:
            return self._extreme(total, x)
        largest = f.smax if self.plan.signed else f.umax
        smallest = f.smin if self.plan.signed else f.umin
        return f.value((largest if kind is ReduceKind.MAX else smallest)(total, x))

    def _extreme(self, total: Value, x: Value) -> Value:
        """NumPy's maximum: the earlier value stays when it is NaN or equal (think of signed zeros)."""
        f = self.f
        keeps = f.fcmp("oge" if self.plan.kind is ReduceKind.MAX else "ole", total, x)
        return f.select(f.value(f.or_(keeps, f.is_nan(total))), total, x)


def emit(target: Target, dtype: str, kind: ReduceKind, stream: bool) -> str:
    """LLVM IR of `void rlx_reduce(ptr table, i64 n, i64 m, i64 count)`; the table lists n sources, m
    destinations.

    With `stream` the stores go past the caches; destinations must then be aligned to whole vectors.
    """
    from rlx.codegen.native.irtext import Module

    module = Module(target)
    _emit_kernel(module, "rlx_reduce", _plan(dtype, kind), stream)
    return module.text()


def _emit_kernel(module: Any, name: str, plan: _Plan, nontemporal: bool) -> None:
    from rlx.codegen.native.irtypes import vector

    params = [("ptr", "sources"), ("i64", "ranks"), ("i64", "places"), ("i64", "count")]
    f = module.function(name, params)
    sources, ranks, places, count = f.args
    destinations = f.gep(sources, ranks, "i64")
    emitter = _Emitter(f, plan, ranks)
    lanes = module.target.vector_bytes // plan.lanes_bytes

    def block(start: Value, vectors: int, width: int, past_caches: bool) -> None:
        """Reduce `vectors` x `width` elements from `start` on, all in registers."""
        stored = vector(plan.stored, width)
        at = [f.add(start, v * width) for v in range(vectors)]

        def values(rank: Any) -> list[Value]:
            source = f.field(sources, rank, "ptr")
            return [emitter.widen(f.load(stored, f.gep(source, i, plan.stored))) for i in at]

        totals = [emitter.first(x) for x in values(0)]
        parts = len(totals[0])

        def fold(rank: Any, carried: list[Value]) -> list[Value]:
            grouped = [carried[v * parts : (v + 1) * parts] for v in range(vectors)]
            return [
                part
                for total, x in zip(grouped, values(rank), strict=True)
                for part in emitter.fold(total, x)
            ]

        flat = f.loop(1, ranks, 1, [part for total in totals for part in total], fold)
        results = [emitter.narrow(emitter.finish(flat[v * parts : (v + 1) * parts])) for v in range(vectors)]

        def write(place: Any, _: list[Value]) -> None:
            destination = f.field(destinations, place, "ptr")
            for i, result in zip(at, results, strict=True):
                f.store(result, f.gep(destination, i, plan.stored), nontemporal=past_caches)

        f.loop(0, places, 1, [], write)

    done: Any = 0
    for vectors, width in ((UNROLL, lanes), (1, lanes), (1, 1)):
        if (vectors, width) == (1, 1) and lanes == 1:
            continue
        step = vectors * width
        end = f.sub(count, f.urem(f.sub(count, done), step))
        past_caches = nontemporal and width > 1
        f.loop(done, end, step, [], lambda i, _, v=vectors, w=width, p=past_caches: block(i, v, w, p))
        done = end
    if nontemporal:
        f.fence()


Kernel = Callable[[Sequence[int], Sequence[int], int], None]


@functools.cache
def kernel(dtype: str, kind: ReduceKind) -> Kernel:
    """reduce(source addresses, destination addresses, elements) for a dtype of `rlx.ir.dtype`.

    >>> a, b = np.array([1, 2, 3], np.int32), np.array([10, 20, 30], np.int32)
    >>> kernel("i32", ReduceKind.SUM)([a.ctypes.data, b.ctypes.data], [a.ctypes.data], 3); a.tolist()
    [11, 22, 33]
    """
    from rlx.ir.dtype import dtype as find

    element = find(dtype)
    if element.is_complex:
        if kind not in (ReduceKind.SUM, ReduceKind.MEAN):
            raise DTypeError(
                f"{kind.name} of {element} is not defined; reduce real and imaginary parts separately"
            )
        parts = kernel("f32" if element.name == "c64" else "f64", kind)
        return lambda sources, destinations, count: parts(sources, destinations, 2 * count)
    if element.is_bool and kind is ReduceKind.MEAN:
        raise DTypeError("MEAN of bool is not a bool; cast the array to f32 first")
    if element.storage_only:
        return functools.partial(_reduce_stored, element.name, kind)
    return _reduce_native(dtype, kind, element.itemsize, _native(dtype, kind, False))


def native_address(dtype: str, kind: ReduceKind) -> int | None:
    """Where the native code of a reduction begins: `void (ptr table, i64 n, i64 m, i64 count)`; None if
    NumPy does it, or parts of elements are reduced."""
    from rlx.ir.dtype import dtype as find

    element = find(dtype)
    if element.is_complex or element.storage_only or (element.is_bool and kind is ReduceKind.MEAN):
        return None
    found: int = _native(dtype, kind, False).code.address("rlx_reduce")
    return found


@dataclass(frozen=True)
class _Native:
    """One compiled kernel; the code lives as long as what calls it."""

    code: Any
    call: Callable[[bytes, int, int, int], None]


_compiling = threading.Lock()


@functools.cache
def _native(dtype: str, kind: ReduceKind, stream: bool) -> _Native:
    with _compiling:  # ranks that are threads come here together; one of them compiles
        return _compiled(dtype, kind, stream)


@functools.cache
def _compiled(dtype: str, kind: ReduceKind, stream: bool) -> _Native:
    code = load_cached(emit, dtype, kind, stream)
    i64 = ctypes.c_int64
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p, i64, i64, i64)
    return _Native(code, prototype(code.address("rlx_reduce")))


def _reduce_native(dtype: str, kind: ReduceKind, itemsize: int, plain: _Native) -> Kernel:
    def reduce(sources: Sequence[int], destinations: Sequence[int], count: int) -> None:
        n, m = len(sources), len(destinations)
        table = struct.pack(f"{n + m}q", *sources, *destinations)
        chosen = plain
        if count * itemsize * m >= STREAM_BYTES and not any(d % VECTOR_ALIGN for d in destinations):
            chosen = _native(dtype, kind, True)
        chosen.call(table, n, m, count)

    return reduce


def _reduce_stored(
    dtype: str, kind: ReduceKind, sources: Sequence[int], destinations: Sequence[int], count: int
) -> None:
    """Dtypes that hold values but are not computed in: reduced by NumPy in f32 (integers in i32)."""
    from rlx.ir.dtype import convert
    from rlx.ir.dtype import dtype as find

    element = find(dtype)
    wide = np.dtype(np.float32 if element.is_float else np.int32)
    values = [convert(array_at(source, element.np, count), wide) for source in sources]
    step = {ReduceKind.MAX: np.maximum, ReduceKind.MIN: np.minimum, ReduceKind.PROD: np.multiply}.get(
        kind, np.add
    )
    total = functools.reduce(step, values)
    if kind is ReduceKind.MEAN:
        total = total / wide.type(len(values)) if element.is_float else total // len(values)
    result = convert(total, element)
    for destination in destinations:
        array_at(destination, element.np, count)[:] = result


def array_at(address: int, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """A view of memory that the caller keeps alive."""
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.ctypeslib.as_array(raw).view(dtype)
