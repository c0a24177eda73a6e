"""The collectives, the same for every transport.

Each one cuts arrays into regions and lets `transport.exchange` move them; reductions are our own kernels,
applied in the order of the ranks, so results are bitwise equal on all ranks, runs and transports.

`buf` is a region of this rank's heap from `transport.alloc`; pass None for arrays that live elsewhere.
Arrays that are in the heap on every rank (`transport.view(transport.this_rank, buf)`) are used where they
are, without copies; others go through the transport's staging areas.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np

from rlx.dist.errors import LengthMismatch, OutOfBounds, TransportError
from rlx.dist.native.copies import copy_bytes
from rlx.dist.native.reduce import STREAM_BYTES, Kernel, kernel, native_address
from rlx.dist.transport import DONE, Array, CollectiveCall, Outgoing, Repeat, SymmetricTransport, address_of, check_rank
from rlx.dist.types import ReduceKind, SymmetricBuffer
from rlx.errors import DTypeError
from rlx.ir.dtype import dtype as find
from rlx.ir.dtype import refuse_lossy


def all_reduce(
    transport: SymmetricTransport,
    buf: SymmetricBuffer | None,
    array: Array,
    kind: ReduceKind = ReduceKind.SUM,
    timeout: float | None = None,
) -> Array:
    """Reduce `array` over all ranks, in place, and return it.

    >>> import rlx.dist as dist
    >>> dist.run_threads(2, lambda t: all_reduce(t, None, np.array([t.this_rank, 5])).tolist())
    [[1, 10], [1, 10]]
    """
    met = transport.again("all_reduce", kind, buf, array, array, timeout)
    if met == DONE:
        return array
    work = _checked(transport, buf, array, in_place=True)
    n, nbytes, itemsize, own = transport.num_ranks, array.nbytes, array.itemsize, address_of(work)
    one_shot = transport.costs.one_shot_pays(nbytes, n)
    call, reduce, native, regions = _reduce_layout(
        "all_reduce", array.dtype, kind, nbytes, 1 if one_shot else n
    )
    outgoing = Outgoing(
        work,
        regions,
        share=not one_shot,
        overwritten=one_shot,
        into=(own, 0) if native else None,
        reduce=native,
        repeat=Repeat("all_reduce", kind, buf, array, array),
        met=met,
    )
    for step in transport.exchange(call, outgoing, timeout):
        reduce(step.sources, step.destinations or (own + step.start,), step.sizes[0] // itemsize)
    if work is not array:
        array[...] = work
    return array


def reduce_scatter(
    transport: SymmetricTransport,
    buf: SymmetricBuffer | None,
    array: Array,
    kind: ReduceKind = ReduceKind.SUM,
    timeout: float | None = None,
    out: Array | None = None,
) -> Array:
    """Reduce over all ranks; this rank gets its chunk of the first axis, as `np.array_split` cuts it.

    >>> import rlx.dist as dist
    >>> dist.run_threads(2, lambda t: reduce_scatter(t, None, np.arange(5)).tolist())
    [[0, 2, 4], [6, 8]]
    """
    met = None if out is None else transport.again("reduce_scatter", kind, buf, array, out, timeout)
    if out is not None and met == DONE:
        return out
    work = _checked(transport, buf, array)
    call, reduce, native, _ = _reduce_layout("reduce_scatter", array.dtype, kind, array.nbytes)
    shape, regions = _chunks(array.shape, array.itemsize, transport.num_ranks, transport.this_rank)
    result = _result(out, shape, array.dtype)
    own = address_of(result)
    into, repeat = (own, 0) if native else None, Repeat("reduce_scatter", kind, buf, array, result)
    outgoing = Outgoing(work, regions, into=into, reduce=native, repeat=repeat, met=met)
    for step in transport.exchange(call, outgoing, timeout):
        reduce(step.sources, (own + step.start,), step.sizes[0] // array.itemsize)
    return result


def all_gather(
    transport: SymmetricTransport,
    buf: SymmetricBuffer | None,
    array: Array,
    timeout: float | None = None,
    out: Array | None = None,
) -> Array:
    """The arrays of all ranks, one after the other along the first axis, which may differ in length.

    >>> import rlx.dist as dist
    >>> dist.run_threads(2, lambda t: all_gather(t, None, np.full(t.this_rank + 1, t.this_rank)).tolist())
    [[0, 1, 1], [0, 1, 1]]
    """
    met = None if out is None else transport.again("all_gather", None, buf, array, out, timeout)
    if out is not None and met == DONE:
        return out
    work = _checked(transport, buf, array)
    row_bytes = array.itemsize * math.prod(array.shape[1:]) if array.ndim else 0
    call = _call("all_gather", array.dtype, row_bytes=row_bytes)
    n, starts = transport.num_ranks, [0]
    # It fits if all ranks bring the same, which only the exchange finds out.
    result = _fits(out, (n * (array.shape or (1,))[0], *array.shape[1:]), array.dtype)
    own = address_of(result)
    repeat = Repeat("all_gather", None, buf, array, result)
    outgoing = Outgoing(work, ((0, work.nbytes),), into=(own, work.nbytes), repeat=repeat, met=met)
    for step in transport.exchange(call, outgoing, timeout):
        if step.start == 0:
            starts = [sum(step.totals[:rank]) for rank in range(n + 1)]
            if starts[-1] != result.nbytes:
                result = _fits(out, (starts[-1] // row_bytes, *array.shape[1:]), array.dtype)
                own = address_of(result)
        for rank in _ring(transport.this_rank, n):
            copy_bytes(own + starts[rank] + step.start, step.sources[rank], step.sizes[rank], result.nbytes)
    if out is not None and result is not out:
        raise LengthMismatch(result.nbytes, out.nbytes, "the array `out` of all_gather")
    return result


def broadcast(
    transport: SymmetricTransport,
    buf: SymmetricBuffer | None,
    array: Array,
    root: int = 0,
    timeout: float | None = None,
) -> Array:
    """Copy the array of rank `root` into the arrays of all others, in place, and return it.

    >>> import rlx.dist as dist
    >>> dist.run_threads(2, lambda t: broadcast(t, None, np.full(2, t.this_rank), root=1).tolist())
    [[1, 1], [1, 1]]
    """
    met = transport.again("broadcast", root, buf, array, array, timeout)
    if met == DONE:
        return array
    root = check_rank(root, transport.num_ranks)
    work = _checked(transport, buf, array, in_place=transport.this_rank != root)
    call = _call("broadcast", array.dtype, root=root)
    own = address_of(work)
    whole, repeat = ((0, work.nbytes),), Repeat("broadcast", root, buf, array, array)
    outgoing = Outgoing(work, whole, sender=root, into=(own, 0), repeat=repeat, met=met)
    for step in transport.exchange(call, outgoing, timeout):
        if transport.this_rank != root:
            copy_bytes(own + step.start, step.sources[0], step.sizes[0], work.nbytes)
    if work is not array and transport.this_rank != root:
        array[...] = work
    return array


def all_to_all(
    transport: SymmetricTransport,
    buf: SymmetricBuffer | None,
    array: Array,
    timeout: float | None = None,
    out: Array | None = None,
) -> Array:
    """Send chunk r of the first axis (as `np.array_split` cuts it) to rank r; the result holds what came,
    by rank.

    >>> import rlx.dist as dist
    >>> dist.run_threads(2, lambda t: all_to_all(t, None, np.arange(4) + 10 * t.this_rank).tolist())
    [[0, 1, 10, 11], [2, 3, 12, 13]]
    """
    met = None if out is None else transport.again("all_to_all", None, buf, array, out, timeout)
    if out is not None and met == DONE:
        return out
    work = _checked(transport, buf, array)
    n, rank = transport.num_ranks, transport.this_rank
    (rows, *rest), regions = _chunks(array.shape, array.itemsize, n, rank)
    result = _result(out, (rows * n, *rest), array.dtype)
    call, own, chunk = _call("all_to_all", array.dtype), address_of(result), result.nbytes // n
    repeat = Repeat("all_to_all", None, buf, array, result)
    outgoing = Outgoing(work, regions, into=(own, chunk), repeat=repeat, met=met)
    for step in transport.exchange(call, outgoing, timeout):
        for sender in _ring(rank, n):
            place = own + sender * chunk + step.start
            copy_bytes(place, step.sources[sender], step.sizes[sender], result.nbytes)
    return result


# ---- arrays and regions


def _checked(
    transport: SymmetricTransport, buf: SymmetricBuffer | None, array: Array, in_place: bool = False
) -> Array:
    """The array in one piece of memory, after checking it and the buffer."""
    if not isinstance(array, np.ndarray):
        raise TransportError(f"a collective needs a NumPy array, not {type(array).__name__}; use np.asarray")
    refuse_lossy(array, "the array of a collective")
    if in_place and not array.flags.writeable:
        raise TransportError(
            f"the array {array.shape} of {array.dtype} is read-only, but receives the result; pass a writable copy"
        )
    if buf is not None:
        if buf.rank != transport.this_rank:
            raise TransportError(
                f"the buffer is of rank {buf.rank}; pass the region of this rank {transport.this_rank}"
            )
        if buf.offset < 0 or buf.offset + buf.len > transport.heap_size:
            raise OutOfBounds(buf.rank, buf.offset, buf.len, transport.heap_size)
        if buf.len < array.nbytes:
            raise LengthMismatch(array.nbytes, buf.len, f"the buffer at offset {buf.offset}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


Regions = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=1024)
def _chunks(shape: tuple[int, ...], itemsize: int, parts: int, mine: int) -> tuple[tuple[int, ...], Regions]:
    """Shape of this rank's chunk of the first axis, and the bytes of all chunks.

    Chunks are equal, or the first ones are longer by one row where the axis does not divide.

    >>> _chunks((5, 2), 4, 2, 1)
    ((2, 2), ((0, 24), (24, 16)))
    """
    if not shape:
        raise TransportError("a 0-d array has no first axis to cut into chunks; reshape it to 1-d")
    row_bytes = itemsize * math.prod(shape[1:])
    rows = [shape[0] // parts + (part < shape[0] % parts) for part in range(parts)]
    regions = tuple((sum(rows[:part]) * row_bytes, count * row_bytes) for part, count in enumerate(rows))
    return (rows[mine], *shape[1:]), regions


@functools.cache
def _ring(rank: int, n: int) -> tuple[int, ...]:
    """In which order a rank reads: itself, its neighbour and so on round, so that nobody is crowded."""
    return tuple((rank + step) % n for step in range(n))


def _slices(nbytes: int, parts: int, unit: int) -> Regions:
    """Nearly equal parts of `nbytes` that start at multiples of `unit`, so that vectors and lines are whole.

    >>> _slices(200, 3, 64)
    ((0, 128), (128, 64), (192, 8))
    """
    units = -(-nbytes // unit)
    edges = [min(nbytes, (units * part + parts - 1) // parts * unit) for part in range(parts + 1)]
    return tuple((low, high - low) for low, high in itertools.pairwise(edges))


def _fits(out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """`out` if it can take the result, else a new array."""
    if out is not None and out.shape == shape and out.dtype == dtype:
        flags = out.flags
        if flags.c_contiguous and flags.writeable:
            return out
    return np.empty(shape, dtype)


def _result(out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    result = _fits(out, shape, dtype)
    if out is not None and result is not out:
        raise TransportError(f"`out` must be a contiguous writable array of shape {shape} and dtype {dtype}")
    return result


# ---- calls


@functools.cache
def _call(op: str, dtype: np.dtype, kind: str = "", root: int = 0, row_bytes: int = 0) -> CollectiveCall:
    return CollectiveCall(op, find(dtype).name, kind, root, row_bytes)


@functools.lru_cache(maxsize=1024)
def _reduce_layout(
    op: str, dtype: np.dtype, kind: ReduceKind, nbytes: int = 0, parts: int = 1
) -> tuple[CollectiveCall, Kernel, int, Regions]:
    """The call, its kernel, its native code (0 if NumPy does it, or stores are non-temporal), and where a
    flat array is cut: between cache lines."""
    if not isinstance(kind, ReduceKind):
        raise DTypeError(f"{kind!r} is not a ReduceKind; use ReduceKind.SUM, MEAN, MAX, MIN or PROD")
    call = _call(op, dtype, kind.value)
    reduce = kernel(call.dtype, kind)
    native = native_address(call.dtype, kind) if nbytes < STREAM_BYTES else None
    return call, reduce, native or 0, _slices(nbytes, parts, math.lcm(64, dtype.itemsize))
