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
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import size_bytes, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    at,
    builder,
    fence,
    field,
    gep,
    i64,
    load,
    ptr,
    sdiv,
    select,
    srem,
    store,
    udiv,
    urem,
)
from rlx.dist.types import ReduceKind
from rlx.errors import DTypeError
from rlx.ir.dtype import convert
from rlx.ir.dtype import dtype as find
from rlx.records import dataclass
from rlx.runtime.native.code import load_for_host

if TYPE_CHECKING:
    from rlx.codegen.native.jit import Code
    from rlx.target.cpu import Target

UNROLL = 4
# From this many bytes of results on, stores are non-temporal: the lines would be evicted before they are
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
    def is_float(self) -> bool:
        """Whether values are computed as floats."""
        return self.computed in ("float", "double")

    @property
    def splits_mean(self) -> bool:
        """64-bit integers have nothing wider: quotients and remainders are summed separately, which cannot
        overflow."""
        return self.kind is ReduceKind.MEAN and not self.is_float

    @property
    def lanes_bytes(self) -> int:
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


def emit(target: Target, dtype: str, kind: ReduceKind, stream: bool) -> str:
    """LLVM IR of `rlx_reduce` for a dtype and kind.

    With `stream` the stores are non-temporal; destinations must then be aligned to whole vectors.
    """
    module = Module(target)
    rlx_reduce.emit(module, plan=_plan(dtype, kind), nontemporal=stream)
    return module.text()


@native
def rlx_reduce(sources: ptr, ranks: i64, places: i64, count: i64, *, plan: _Plan, nontemporal: bool) -> None:
    """Reduce `count` elements. The table at `sources` lists a source per rank, then the destinations."""
    destinations = at(sources, ranks)
    lanes = builder().module.target.vector_bytes // plan.lanes_bytes

    def block(start: i64 | int, vectors: int, width: int, is_streamed: bool) -> None:
        """Reduce `vectors` x `width` elements from `start` on, all in registers."""
        stored = vector(plan.stored, width)
        indices = [start + v * width for v in range(vectors)]

        def values(rank: i64 | int) -> list[Word]:
            source = field(sources, rank, ptr)
            return [_widen(plan, load(stored, gep(source, i, plan.stored))) for i in indices]

        totals = [_first(plan, ranks, x) for x in values(0)]
        for rank in range(1, ranks):
            totals = [_fold(plan, ranks, total, x) for total, x in zip(totals, values(rank), strict=True)]
        results = [_narrow(plan, _finish(plan, ranks, total)) for total in totals]
        for place in range(places):
            destination = field(destinations, place, ptr)
            for i, result in zip(indices, results, strict=True):
                store(result, gep(destination, i, plan.stored), nontemporal=is_streamed)

    done: i64 | int = 0
    for vectors, width in ((UNROLL, lanes), (1, lanes), (1, 1)):
        if (vectors, width) == (1, 1) and lanes == 1:
            continue
        step = vectors * width
        end = count - urem(count - done, step)
        for i in range(done, end, step):
            block(i, vectors, width, nontemporal and width > 1)
        done = end
    if nontemporal:
        fence()


# -- one step, of scalars or vectors


@inline
def _widen(plan: _Plan, x: Word) -> Word:
    f = builder()
    if plan.stored == plan.computed:
        return x
    if plan.stored in ("half", "bfloat"):
        return Word(f.fpext(x, plan.computed))
    return Word(f.sitofp(x, plan.computed) if plan.signed else f.uitofp(x, plan.computed))


@inline
def _narrow(plan: _Plan, x: Word) -> Word:
    f = builder()
    if plan.stored == plan.computed:
        return x
    if plan.stored in ("half", "bfloat"):
        return Word(f.fptrunc(x, plan.stored))
    whole = f.fptosi(x, "i64")  # the mean of integers is in their range, and i64 holds that of u32
    return Word(f.trunc(whole, plan.stored))


@inline
def _first(plan: _Plan, ranks: i64, x: Word) -> list[Word]:
    return _quotient_and_rest(plan, ranks, x) if plan.splits_mean else [x]


@inline
def _fold(plan: _Plan, ranks: i64, total: list[Word], x: Word) -> list[Word]:
    """The total with one more rank's value."""
    if plan.splits_mean:
        quotient, rest = _quotient_and_rest(plan, ranks, x)
        return [total[0] + quotient, total[1] + rest]
    if plan.kind in (ReduceKind.SUM, ReduceKind.MEAN):
        return [total[0] + x]
    if plan.kind is ReduceKind.PROD:
        return [total[0] * x]
    return [_extreme(plan, total[0], x)]


@inline
def _extreme(plan: _Plan, total: Word, x: Word) -> Word:
    """NumPy's maximum or minimum: the earlier value stays when it is NaN or equal (think of signed zeros)."""
    is_max = plan.kind is ReduceKind.MAX
    f = builder()
    if plan.is_float:
        keeps = total >= x if is_max else total <= x
        return select(keeps | Word(f.is_nan(total)), total, x)
    if plan.signed:
        return max(total, x) if is_max else min(total, x)
    return Word(f.umax(total, x) if is_max else f.umin(total, x))


@inline
def _finish(plan: _Plan, ranks: i64, total: list[Word]) -> Word:
    if plan.splits_mean:
        extra = udiv(total[1], _count(plan, ranks, total[1]))
        return total[0] + extra
    if plan.kind is not ReduceKind.MEAN:
        return total[0]
    mean = _divided(plan, ranks, total[0])
    return Word(builder().floor(mean)) if plan.stored.startswith("i") else mean


@inline
def _divided(plan: _Plan, ranks: i64, total: Word) -> Word:
    """The total over the number of ranks; for powers of two a multiplication, as exact and much faster."""
    f = builder()
    bits = ranks & (ranks - 1)
    count = _count(plan, ranks, total)
    inverse = f.splat(f.fdiv(f.value(1.0, plan.computed), f.extract(count, 0)), total.width)
    return total * inverse if bits == 0 else total / count


@inline
def _count(plan: _Plan, ranks: i64, like: Word) -> Word:
    f = builder()
    count = f.sitofp(ranks, plan.computed) if plan.is_float else ranks
    return Word(f.splat(count, like.width))


@inline
def _quotient_and_rest(plan: _Plan, ranks: i64, x: Word) -> list[Word]:
    """Floor division of 64-bit integers by the number of ranks."""
    count = _count(plan, ranks, x)
    if not plan.signed:
        return [udiv(x, count), urem(x, count)]
    quotient, rest = sdiv(x, count), srem(x, count)
    is_below = rest < 0
    return [select(is_below, quotient - 1, quotient), select(is_below, rest + count, rest)]


Kernel = Callable[[Sequence[int], Sequence[int], int], None]


@functools.cache
def kernel(dtype: str, kind: ReduceKind) -> Kernel:
    """reduce(source addresses, destination addresses, elements) for a dtype of `rlx.ir.dtype`.

    >>> a, b = np.array([1, 2, 3], np.int32), np.array([10, 20, 30], np.int32)
    >>> kernel("i32", ReduceKind.SUM)([a.ctypes.data, b.ctypes.data], [a.ctypes.data], 3); a.tolist()
    [11, 22, 33]
    """
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
    element = find(dtype)
    if element.is_complex or element.storage_only or (element.is_bool and kind is ReduceKind.MEAN):
        return None
    found: int = _native(dtype, kind, False).code.address(rlx_reduce.name)
    return found


@dataclass(frozen=True)
class _Native:
    """One compiled kernel; the code lives as long as what calls it."""

    code: Code
    call: Callable[[bytes, int, int, int], None]


_compiling = threading.Lock()


@functools.cache
def _native(dtype: str, kind: ReduceKind, stream: bool) -> _Native:
    with _compiling:  # ranks that are threads come here together; one of them compiles
        return _compiled(dtype, kind, stream)


@functools.cache
def _compiled(dtype: str, kind: ReduceKind, stream: bool) -> _Native:
    code = load_for_host(emit, dtype, kind, stream)
    i64 = ctypes.c_int64
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p, i64, i64, i64)
    return _Native(code, prototype(code.address(rlx_reduce.name)))


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


def array_at(address: int, dtype: np.dtype, count: int) -> np.ndarray:
    """A view of memory that the caller keeps alive."""
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.ctypeslib.as_array(raw).view(dtype)
