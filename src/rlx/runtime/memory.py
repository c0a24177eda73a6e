"""Memory for program spaces: anonymous pages, huge ones where they pay, guarded ones for debugging.

Kernels never allocate; everything they touch comes from a `Region` or from arrays of the caller. A region is
freed when the last array over it is dropped. Weights on 4 KiB pages cost a quarter of the memory bandwidth,
so regions of 2 MiB or more request huge pages.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ConfigError, OutOfMemoryError, RlxError
from rlx.ir.weights import round_up
from rlx.system import SYSTEM

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
POISON = 0xFF  # all ones: NaN in every float dtype, -1 or the maximum in every integer dtype
_CANARY = 0xA5


class GuardPageError(RlxError):
    """Bytes in front of a guarded region were overwritten."""


class Region:
    """A piece of zeroed memory. `array` is a uint8 view of it and may outlive the Region object."""

    def __init__(self, mapped: NDArray[np.uint8], start: int, nbytes: int, slack: int = 0) -> None:
        self.array = mapped[start : start + nbytes]
        self.address = mapped.ctypes.data + start  # NumPy does not say where an empty array begins
        self._slack = mapped[start - slack : start]  # of a guarded region: bytes behind the front guard page
        self._slack.fill(_CANARY)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def poison(self) -> None:
        """Fill with bytes that read as NaN, so that a value used before it is written shows in the result.

        >>> region = allocate(8); region.poison(); bool(np.isnan(region.array.view(np.float32)).all())
        True
        """
        self.array.fill(POISON)

    def check(self) -> None:
        """Raise if something wrote just in front of a guarded region (writes further out trap at once)."""
        spoiled = np.flatnonzero(self._slack != _CANARY)
        if spoiled.size:
            before = self._slack.size - int(spoiled[0])
            raise GuardPageError(
                f"a kernel wrote {before} bytes in front of the region at {self.address:#x} "
                f"({self.nbytes} bytes); its operand offset or loop start is wrong"
            )


def allocate(
    nbytes: int,
    align: int = 64,
    huge: bool = True,
    guard: bool = False,
    poison: bool = False,
    fence: bool = False,
) -> Region:
    """`nbytes` of zeroed memory at a multiple of `align`; regions of 2 MiB or more are on huge pages.

    With `guard` any access past the end faults at once, to the byte; the start then has only the alignment
    that `nbytes` has. Accesses before the first page fault too, and `Region.check` finds writes in between.
    With a `fence` the page behind the last one faults, where the system can; it costs no speed.

    >>> region = allocate(100)
    >>> region.nbytes, region.address % 64, int(region.array.sum())
    (100, 0, 0)
    """
    if nbytes < 0:
        raise ConfigError(f"cannot allocate {nbytes} bytes: give a size of 0 or more")
    if align < 1 or align & (align - 1):
        raise ConfigError(f"cannot align memory to {align}: give a power of two")
    region = _guarded(nbytes) if guard else _plain(nbytes, align, huge and nbytes >= HUGE_PAGE, fence)
    if poison:
        region.poison()
    return region


ALIGN_FROM = 128 << 10
"""Bytes from which an output is worth aligning to cache lines, and keeping: the C library takes such blocks
from the system, and gives them back when they are freed."""


class OutputPool:
    """Memory of a program's outputs. Callers own the arrays; memory is used again once no array refers to it.

    The system clears fresh pages when they are first written, which takes longer than many kernels. So large
    blocks are kept for the next run. A run that needs another size frees them: at most the outputs of one run
    are kept.

    >>> pool = OutputPool()
    >>> y = pool.empty((512, 1024), np.dtype(np.float32))
    >>> place, row = y.ctypes.data, y[3]
    >>> del y
    >>> pool.kept  # `row` still refers to the memory
    0
    >>> del row
    >>> pool.kept, pool.empty((512, 1024), np.dtype(np.float32)).ctypes.data == place
    (2097152, True)
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._leased: dict[int, weakref.ref[np.ndarray]] = {}  # by id of their block
        self._lock = threading.Lock()  # of those who take; blocks come back at any time, by one append

    @property
    def kept(self) -> int:
        """Bytes that no array refers to."""
        return sum(block.nbytes for block in self._free)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array for an output, not cleared.

        Large ones begin at a cache line, so that kernels may use non-temporal stores. They begin in the
        middle of a page: NumPy's own large arrays begin just behind the start of one, and a load with the
        last 12 address bits of a recent store waits for it, which slowed maps by a factor of three.

        >>> OutputPool().empty((512, 1024), np.dtype(np.float32)).ctypes.data % 4096
        2048
        """
        size = math.prod(shape) * dtype.itemsize
        if size < ALIGN_FROM:
            return np.empty(shape, dtype)
        block = self._take(size)
        # NumPy makes all views refer to the array that owns their memory, but not past a memoryview: so this
        # array lives as long as one of them.
        lease = block[:]
        self._leased[id(block)] = weakref.ref(lease, functools.partial(self._give_back, block))
        return np.asarray(lease.data).view(dtype).reshape(shape)

    def _take(self, size: int) -> np.ndarray:
        """A block of so many bytes that nobody uses."""
        with self._lock:
            for i, block in enumerate(self._free):
                if block.nbytes == size:
                    return self._free.pop(i)
            self._free.clear()  # of other sizes
        raw = np.empty(size + PAGE, np.uint8)
        start = (PAGE // 2 - raw.ctypes.data) % PAGE
        return raw[start : start + size]

    def _give_back(self, block: np.ndarray, lease: weakref.ref[np.ndarray]) -> None:
        del self._leased[id(block)]
        self._free.append(block)


def address_of(array: np.ndarray) -> int:
    """Where an array begins in memory.

    NumPy builds a dict with the shape and more for that answer. A view by ctypes is four times as quick,
    where there can be one: of memory that may be written, in dtypes that Python's buffers know.

    >>> a = np.zeros(3)
    >>> address_of(a) == a.ctypes.data
    True
    """
    if array.flags.writeable and array.size:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
        except (TypeError, ValueError):  # not contiguous, a dtype of ml_dtypes
            pass
    address: int = array.__array_interface__["data"][0]
    return address


def table(count: int) -> NDArray[np.int64]:
    """A zeroed int64 array that starts on a cache line: for the small tables that native code reads.

    >>> table(3).ctypes.data % 64
    0
    """
    room = np.zeros(count + 8, np.int64)
    skip = -room.ctypes.data % 64 // 8
    return room[skip : skip + count]


def _map(nbytes: int, extra: int) -> mmap.mmap:
    """Pages for `nbytes` and `extra` bytes that the caller did not request."""
    size = max(PAGE, round_up(nbytes + extra, PAGE))
    try:
        return SYSTEM.map_pages(size)
    except (OSError, OverflowError, MemoryError) as error:
        raise OutOfMemoryError(
            f"the system has no room for {nbytes:,} bytes ({error}); lower the batch or set a memory budget"
        ) from error


def _plain(nbytes: int, align: int, huge: bool, fence: bool) -> Region:
    if huge:
        align = max(align, HUGE_PAGE)
    fence = fence and SYSTEM.has_guard_pages
    room = round_up(nbytes, HUGE_PAGE) if huge else round_up(nbytes, PAGE)
    room += PAGE if fence else 0
    # Pages come aligned; a larger alignment is found inside a larger mapping, whose rest is never touched.
    mapping = _map(nbytes, room - nbytes + (align if align > PAGE else 0))
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % align
    if huge:
        SYSTEM.use_huge_pages(mapping, start, room)
    if fence:
        SYSTEM.forbid(whole.ctypes.data + start + round_up(nbytes, PAGE), PAGE)
    return Region(whole, start, nbytes)


def _guarded(nbytes: int) -> Region:
    body = max(PAGE, round_up(nbytes, PAGE))
    whole = np.frombuffer(_map(nbytes, body - nbytes + 2 * PAGE), np.uint8)
    SYSTEM.forbid(whole.ctypes.data, PAGE)
    SYSTEM.forbid(whole.ctypes.data + PAGE + body, PAGE)
    return Region(whole, PAGE + body - nbytes, nbytes, slack=body - nbytes)


def map_file(descriptor: int, size: int, arrays: int) -> mmap.mmap:
    """A read-only mapping of a file whose arrays begin at byte `arrays`: on huge pages where the system has
    them. No page is read here."""
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    if size - arrays >= HUGE_PAGE:
        SYSTEM.use_huge_pages(mapping, arrays, size - arrays)
    return mapping


def drop_pages(array: np.ndarray) -> None:
    """If an array is in the mapping of a file, release its pages; they are read again when needed."""
    base: object = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not array.flags.c_contiguous:
        return
    if not memoryview(base).readonly:
        return  # its own pages, which nothing could read again
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first, end = round_up(start, PAGE), (start + array.nbytes) // PAGE * PAGE
    if end > first:
        SYSTEM.drop_pages(base, first, end - first)
