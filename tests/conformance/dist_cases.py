"""The conformance suite of transports: what every rank runs, on whatever transport it is given.

Every result is compared with NumPy in rank order, and its digest with that of all other ranks. The digests
are returned, so that a test can compare transports bit by bit.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

import rlx.dist as dist
from rlx.dist import ReduceKind, SymmetricBuffer, SymmetricTransport
from rlx.ir.dtype import DType, convert, dtype

Array = np.ndarray[Any, Any]

NATIVE = ("f64", "f32", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
FEW = ("f32", "bf16", "u8", "i64")
ALL = (*NATIVE, "bool", "c64", "f8e4m3fn", "i4")
KIB64, MIB16 = 64 << 10, 16 << 20


def counts_of(name: str) -> tuple[int, ...]:
    """Elements: none, one, an odd number, and around 64 KiB."""
    around = KIB64 // dtype(name).itemsize
    return 0, 1, 1003, around - 1, around, around + 1


@functools.lru_cache(maxsize=64)
def values(name: str, count: int, rank: int) -> Array:
    """The array of a rank; every rank can make those of the others. It must not be changed."""
    element = dtype(name)
    rng = np.random.default_rng([count, rank, len(name), ord(name[0])])
    if element.is_bool:
        made = rng.integers(0, 2, count).astype(bool)
    elif element.is_complex:
        made = (rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(element.np)
    elif element.is_float:
        made = rng.standard_normal(count, np.float32).astype(np.float64)
        made[7::101] = np.nan
        made[11::103] = -np.inf
        made[13::97] = -0.0
        made[17::97] = 1e-310  # below everything but f64
        made = convert(made, element)
    else:
        raw = rng.integers(0, 256, count * element.itemsize, dtype=np.uint8)
        made = convert(raw, element) if element.storage_only else raw.view(element.np)
    made.setflags(write=False)
    return made


def reduced(arrays: list[Array], kind: ReduceKind) -> Array:
    """The reduction as NumPy does it, rank by rank; 16-bit and smaller floats in f32."""
    element = dtype(arrays[0].dtype)
    if kind is ReduceKind.MEAN and element.is_int:
        return exact_mean(arrays, element)
    wide = (
        np.float32 if element.is_float and element.bits <= 16 else np.int32 if element.storage_only else None
    )
    operands = [convert(array, wide) if wide else array for array in arrays]
    steps = {ReduceKind.MAX: np.maximum, ReduceKind.MIN: np.minimum, ReduceKind.PROD: np.multiply}
    with np.errstate(all="ignore"):
        total = functools.reduce(steps.get(kind, np.add), operands)
        if kind is ReduceKind.MEAN:
            # Complex numbers part by part: NumPy would multiply by a rounded 1/n.
            parts = total.view(np.real(total).dtype) if np.iscomplexobj(total) else total
            total = (parts / parts.dtype.type(len(arrays))).view(total.dtype)
        return convert(total, element)


def exact_mean(arrays: list[Array], element: DType) -> Array:
    n = len(arrays)
    if element.bits < 64:
        total = sum(convert(array, np.int64) for array in arrays)
        return convert(np.asarray(total) // n, element)
    return np.array(
        [sum(column) // n for column in zip(*(a.tolist() for a in arrays), strict=True)], element.np
    )


def kinds_of(name: str) -> list[ReduceKind]:
    element = dtype(name)
    if element.is_complex:
        return [ReduceKind.SUM, ReduceKind.MEAN]
    return [kind for kind in ReduceKind if not (element.is_bool and kind is ReduceKind.MEAN)]


def same(got: Array, want: Array) -> bool:
    """Equal dtype, shape and values; NaN equals NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if dtype(got.dtype).kind in "fc":
        wide = np.complex128 if np.iscomplexobj(got) else np.float64
        return np.array_equal(got.astype(wide), want.astype(wide), equal_nan=True)
    return bool((got == want).all())


class Suite:
    """Runs the cases on one rank."""

    def __init__(
        self, transport: SymmetricTransport, dtypes: tuple[str, ...], large: tuple[str, ...]
    ) -> None:
        self.transport, self.dtypes, self.large = transport, dtypes, large
        self.n, self.rank = transport.num_ranks, int(transport.this_rank)
        self.digests: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        for name in self.dtypes:
            for count in counts_of(name):
                self.reductions(name, count)
                self.movements(name, count)
        for name in self.large:
            self.large_arrays(name, MIB16 // dtype(name).itemsize)
        self.shapes()
        self.in_the_heap()
        self.groups()
        return self.digests

    def check(self, case: str, got: Array, want: Array, everywhere: bool) -> None:
        """Compare with NumPy, and note the bits; where all ranks get the same result, they must be equal."""
        assert same(got, want), f"{case} on rank {self.rank} of {self.n}: got {got[:4]}, want {want[:4]}"
        digest = np.frombuffer(
            hashlib.blake2b(np.ascontiguousarray(got).tobytes(), digest_size=16).digest(), np.uint8
        )
        all_digests = dist.all_gather(self.transport, None, digest).reshape(self.n, -1)
        if everywhere:
            assert (all_digests == all_digests[0]).all(), f"{case}: ranks have different bits"
        assert case not in self.digests, case
        self.digests[case] = all_digests.tobytes().hex()

    def reductions(self, name: str, count: int) -> None:
        arrays = [values(name, count, rank) for rank in range(self.n)]
        for kind in kinds_of(name):
            want = reduced(arrays, kind)
            mine = arrays[self.rank].copy()
            got = dist.all_reduce(self.transport, None, mine, kind)
            assert got is mine
            self.check(f"all_reduce {kind.name} {name} {count}", got, want, everywhere=True)
            got = dist.reduce_scatter(self.transport, None, arrays[self.rank], kind)
            chunk = np.array_split(want, self.n)[self.rank]
            self.check(f"reduce_scatter {kind.name} {name} {count}", got, chunk, everywhere=False)

    def movements(self, name: str, count: int) -> None:
        arrays = [values(name, count, rank) for rank in range(self.n)]
        got = dist.all_gather(self.transport, None, arrays[self.rank])
        self.check(f"all_gather {name} {count}", got, np.concatenate(arrays), everywhere=True)
        ragged = [array[: count * (rank + 1) // self.n] for rank, array in enumerate(arrays)]
        got = dist.all_gather(self.transport, None, ragged[self.rank])
        self.check(f"ragged all_gather {name} {count}", got, np.concatenate(ragged), everywhere=True)
        for root in {0, self.n - 1}:
            got = dist.broadcast(self.transport, None, arrays[self.rank].copy(), root)
            self.check(f"broadcast {root} {name} {count}", got, arrays[root], everywhere=True)
        got = dist.all_to_all(self.transport, None, arrays[self.rank])
        want = np.concatenate([np.array_split(array, self.n)[self.rank] for array in arrays])
        self.check(f"all_to_all {name} {count}", got, want, everywhere=False)

    def large_arrays(self, name: str, count: int) -> None:
        """Only rank 0 makes everybody's arrays; the digests carry its verdict to the others."""
        mine = values(name, count, self.rank)
        got = dist.all_reduce(self.transport, None, mine.copy())
        want = (
            reduced([values(name, count, rank) for rank in range(self.n)], ReduceKind.SUM)
            if not self.rank
            else got
        )
        self.check(f"all_reduce SUM {name} {count}", got, want, everywhere=True)
        scattered = dist.reduce_scatter(self.transport, None, mine)
        gathered = dist.all_gather(self.transport, None, scattered)
        self.check(f"reduce_scatter and all_gather {name} {count}", gathered, got, everywhere=True)
        there = dist.all_to_all(self.transport, None, mine[: count // self.n**2 * self.n**2])
        back = dist.all_to_all(self.transport, None, there)
        assert same(back, mine[: len(back)]), f"all_to_all there and back {name} {count}"
        got = dist.broadcast(self.transport, None, mine.copy(), self.n - 1)
        self.check(f"broadcast {name} {count}", got, values(name, count, self.n - 1), everywhere=True)
        values.cache_clear()

    def shapes(self) -> None:
        mine = np.arange(30.0).reshape(5, 3, 2) + self.rank
        turned = mine.transpose(2, 0, 1)
        got = dist.all_gather(self.transport, None, turned)
        assert got.shape == (2 * self.n, 5, 3) and (got[2 * self.rank : 2 * self.rank + 2] == turned).all()
        backwards = mine.copy()[::-1]
        got = dist.all_reduce(self.transport, None, backwards)
        assert (
            got is backwards
            and (got == sum(np.arange(30.0).reshape(5, 3, 2)[::-1] + r for r in range(self.n))).all()
        )
        scalar = dist.all_reduce(self.transport, None, np.array(self.rank + 1), ReduceKind.PROD)
        assert scalar.shape == () and scalar == np.prod(np.arange(1, self.n + 1))
        assert dist.all_gather(self.transport, None, np.array(self.rank)).tolist() == list(range(self.n))
        empty = np.zeros((3, 0), np.float32)
        assert dist.all_gather(self.transport, None, empty).shape == (3 * self.n, 0)
        chunk = dist.reduce_scatter(self.transport, None, np.ones((4, 2), np.float32))
        assert chunk.shape == (len(np.array_split(np.arange(4), self.n)[self.rank]), 2)

    def in_the_heap(self) -> None:
        """Arrays in the heap on every rank, on some, and with different offsets."""
        count = KIB64 // 4 + 5
        arrays = [values("f32", count, rank) for rank in range(self.n)]
        want = reduced(arrays, ReduceKind.SUM)
        buf = self.transport.alloc(count * 4)
        for case, is_there in (("all", True), ("some", self.rank % 2 == 0), ("none", False)):
            place = (
                self.transport.view(self.rank, buf).view(np.float32)
                if is_there
                else np.empty(count, np.float32)
            )
            place[:] = arrays[self.rank]
            got = dist.all_reduce(self.transport, buf, place)
            self.check(f"all_reduce {case} in the heap", got, want, everywhere=True)
            place[:] = arrays[self.rank]
            got = dist.all_gather(self.transport, buf, place)
            self.check(f"all_gather {case} in the heap", got, np.concatenate(arrays), everywhere=True)
            got = dist.broadcast(self.transport, buf, place, root=self.n - 1)
            self.check(f"broadcast {case} in the heap", got, arrays[-1], everywhere=True)
            place[:] = arrays[self.rank]
            got = dist.all_to_all(self.transport, buf, place)
            parts = [np.array_split(array, self.n)[self.rank] for array in arrays]
            self.check(f"all_to_all {case} in the heap", got, np.concatenate(parts), everywhere=False)
        self.transport.free(buf)

    def groups(self) -> None:
        """Even and odd ranks, then pairs of them."""
        members = [[r for r in range(self.n) if r % 2 == parity] for parity in (0, 1)]
        group = self.transport.split([m for m in members if m])
        mine = members[self.rank % 2]
        assert group.num_ranks == len(mine) and mine[group.this_rank] == self.rank
        got = dist.all_reduce(group, None, values("bf16", 5000, self.rank).copy())
        want = reduced([values("bf16", 5000, rank) for rank in mine], ReduceKind.SUM)
        assert same(got, want)
        pairs = [list(range(i, min(i + 2, len(mine)))) for i in range(0, len(mine), 2)]
        pair = group.split(pairs)
        got = dist.all_gather(pair, None, np.array([self.rank]))
        assert got.tolist() == [mine[i] for i in pairs[group.this_rank // 2]]
        everybody = dist.all_reduce(self.transport, None, np.array([1 << self.rank]))
        assert everybody[0] == (1 << self.n) - 1


def one_sided(transport: SymmetricTransport) -> None:
    """put, get, view, signals: everybody writes into its neighbour."""
    n, rank = transport.num_ranks, int(transport.this_rank)
    right, left = (rank + 1) % n, (rank - 1) % n
    buf = transport.alloc(8 * 100)
    transport.put(buf.on(rank), np.full(100, -1.0))
    transport.barrier()
    transport.put(buf.on(right), np.arange(100.0) + rank)
    transport.barrier()
    got = np.empty(100)
    transport.get(buf.on(rank), got)
    assert (got == np.arange(100.0) + left).all()
    transport.get(buf.on(right), got)
    assert (got == np.arange(100.0) + rank).all()
    assert (transport.view(rank, buf).view(np.float64) == np.arange(100.0) + left).all()
    transport.barrier()
    for round_ in range(20):
        transport.put_signal(buf.on(right).part(0, 8), np.array([round_ * 1000.0 + rank]), signal=3)
        transport.wait_signal(3)
        assert transport.view(rank, buf).view(np.float64)[0] == round_ * 1000.0 + left
        transport.barrier()
    for other in range(n):
        transport.put_signal(
            SymmetricBuffer(other, buf.offset + 8 * rank, 8), np.array([float(rank)]), signal=1
        )
    transport.wait_signal(1, count=n)
    assert transport.view(rank, buf).view(np.float64)[:n].tolist() == [float(r) for r in range(n)]
    transport.barrier()
    transport.free(buf)


def differing_calls(transport: SymmetricTransport) -> None:
    """Ranks that do not agree get an error, all of them, and can go on."""
    if transport.num_ranks == 1:
        return
    rank, errors = transport.this_rank, []
    calls = [
        lambda: dist.all_reduce(transport, None, np.zeros(4 + rank)),
        lambda: dist.all_reduce(transport, None, np.zeros(4, np.float32 if rank else np.float64)),
        lambda: dist.broadcast(transport, None, np.zeros(4), root=0 if rank else 1),
        lambda: transport.barrier() if rank else dist.all_gather(transport, None, np.zeros(4)),
    ]
    for call in calls:
        try:
            call()
        except dist.CollectiveError as error:
            errors.append(type(error))
    assert errors == [dist.LengthMismatch, dist.TransportError, dist.TransportError, dist.TransportError], (
        errors
    )
    assert dist.all_reduce(transport, None, np.ones(3)).tolist() == [transport.num_ranks] * 3


def everything(
    transport: SymmetricTransport, dtypes: tuple[str, ...], large: tuple[str, ...] = ()
) -> dict[str, str]:
    one_sided(transport)
    differing_calls(transport)
    return Suite(transport, dtypes, large).run()
