"""A whole exchange between ranks that map each other's heaps, in one native call.

The call meets the others, copies or reduces what is there for this rank, and meets them again. Arrays in the
heap are read where they are; large ones elsewhere may be read in the other processes' own memory (`remote`);
all others go piece by piece through the staging memory.

A call that has copied a megabyte finds Python's own memory gone from the caches, where every line of Python
costs a microsecond; so a call with the same arrays as one before needs no more of it than to find its table.

While it waits, the call looks after deaths and deadlines through a callback. What it cannot do (ranks bring
different lengths, some have their arrays in the heap and some not) is left to `MappedTransport.exchange`,
which continues after the first rendezvous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dist.native import exchange_code as code
from rlx.dist.native import sync
from rlx.dist.native.copies import LINE, STREAM_BYTES, code_for, nanoseconds_per_byte
from rlx.dist.heap import RING_BYTES, STAGE_BYTES
from rlx.dist.transport import Outgoing, address_of

# From this size on arrays are always read in the other processes' own memory, where that is possible: to
# stage them would write every byte twice to memory.
REMOTE_BYTES = 16 << 20


def lines(nbytes: int) -> int:
    """Bytes of the cache lines that hold `nbytes`, at least one."""
    return max(1, -(-nbytes // LINE)) * LINE


def slot_bytes(regions: Sequence[tuple[int, int]], longest: int) -> int:
    """How much of every region is staged at once."""
    return min(STAGE_BYTES // len(regions) // LINE * LINE, lines(longest))


class Exchanger:
    """The native call of one group, and its position in the ring of staging memory.

    Every piece of an exchange is staged behind the one before. A line that comes round again has left the
    other cores' own caches; to write one that is still there takes five times as long.
    """

    def __init__(self, post: int, heaps: Sequence[int], stages: Sequence[int], me: int) -> None:
        native = code.loaded()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
        self.run = prototype(native.address("rlx_exchange"))
        self.again = prototype(native.address("rlx_again"))
        self._memory = np.zeros(3 * len(heaps) + code.RING_FIELDS, np.int64)
        self._memory[: 2 * len(heaps)] = [*heaps, *stages]
        self._ring = self._memory[-code.RING_FIELDS :]
        address, self._n, self._me = address_of(self._memory), len(heaps), me
        meetings: Any = sync.sync().code
        self._common = np.zeros(code.FIELDS, np.int64)
        self._common[code.POST] = post
        self._common[[code.BARRIER, code.WAIT]] = [
            meetings.address(f"rlx_{name}") for name in ("barrier", "wait")
        ]
        parts = [address + 8 * self._n * part for part in range(4)]
        self._common[[code.HEAPS, code.STAGES, code.PROCESSES, code.RING]] = parts

    def set_processes(self, pids: Sequence[int]) -> None:
        """The members' processes, whose own memory may be read."""
        self._memory[2 * self._n : 3 * self._n] = pids

    @property
    def position(self) -> int:
        """Where in the ring the next piece begins, on all ranks."""
        return int(self._ring[code.POSITION])

    @property
    def far(self) -> bool:
        """Whether the other ranks' cores seem not to share a cache with this one's."""
        return bool(self._ring[code.FAR])

    def count_as_far(self) -> None:
        """Some rank finds that they are far away; now all do, from the same call on."""
        self._ring[[code.SLOW, code.FAR]] = code.SLOW_FILLS, code.FAR_CALLS

    def advance(self, used: int) -> None:
        """Go past a piece; there is always room for the largest."""
        moved = self.position + used
        full = moved + STAGE_BYTES > RING_BYTES
        self._ring[code.POSITION] = 0 if full else moved
        self._ring[code.ROUNDS] += full

    def table(
        self,
        tag: int,
        out: Outgoing,
        place: int,
        look: int,
        away: int = 0,
        facts: Sequence[tuple[int, int, int]] = (),
    ) -> np.ndarray:
        """All that the call needs to know of an exchange whose results go to `out.into`.

        `place` is where the array is in the heap, or 0; `away` what to post if others shall read it in this
        process's own memory, or 0 if they cannot.
        """
        assert out.into is not None
        n, nbytes, regions, fields = self._n, out.array.nbytes, out.regions, code.FIELDS
        pieces = [self._common, np.zeros(2 * n, np.int64), np.array(regions, np.int64).reshape(-1)]
        table = np.concatenate([*pieces, np.array(facts, np.int64).reshape(-1)])
        address, start, size = address_of(table), *regions[self._me if len(regions) > 1 else 0]
        longest = max(length for _, length in regions)
        total = nbytes if out.share else size * (1 if out.reduce else n)
        slot = slot_bytes(regions, longest)
        filled = sum(min(slot, length) for _, length in regions)
        filled -= min(slot, size) if len(regions) > 1 else 0  # nobody sends to itself
        judged = n > 1 and out.sender is None and filled >= code.MEASURED_BYTES and nbytes < STREAM_BYTES
        limit = filled * code.FAR_FACTOR * nanoseconds_per_byte() if judged else 0
        loops = [code_for(nbytes), code_for(STREAM_BYTES), 0 if out.overlaps(n) else code_for(total)]
        table[[code.LOOK, code.TAG, code.LENGTH, code.PLACE, code.AWAY]] = look, tag, nbytes, place, away
        table[[code.ALWAYS, code.TOO_LONG]] = nbytes >= REMOTE_BYTES, int(limit)
        table[[code.ARRAY, code.REGIONS, code.LONGEST]] = address_of(out.array), len(regions), longest
        table[[code.SLOT, code.START, code.SIZE]] = slot, start, size
        table[[code.TO, code.STRIDE]] = out.into
        table[[code.SENDER, code.SHARE]] = code.NOBODY if out.sender is None else out.sender, out.share
        table[[code.REDUCE, code.ITEM]] = out.reduce, out.array.itemsize
        table[[code.FILL, code.PAST, code.COPY]] = loops
        table[[code.POINTERS, code.CUTS]] = address + 8 * fields, address + 8 * (fields + 2 * n)
        table[[code.FACTS, code.COMPARED]] = address + 8 * (fields + 2 * n + 2 * len(regions)), len(facts)
        return table


# Where NumPy's array object holds what it knows, behind the object's own fields, as its C interface says:
# address of the data, number of dimensions, their sizes, (strides, base,) element type, flags.
_DATA, _RANK, _SHAPE, _DTYPE, _FLAGS = (object.__basicsize__ + 8 * index for index in (0, 1, 2, 5, 6))
_WORD, _INT = -1, 2**32 - 1


def facts_of(array: np.ndarray) -> list[tuple[int, int, int]]:
    """(address, value, mask) of the words that make an array what it is, to find it unchanged.

    >>> a = np.zeros((2, 3))
    >>> [value for _, value, _ in facts_of(a)][-2:]
    [2, 3]
    """
    masks = {_DATA: _WORD, _RANK: _INT, _SHAPE: _WORD, _DTYPE: _WORD, _FLAGS: _INT}
    known = [(id(array) + offset, mask) for offset, mask in masks.items()]
    sizes = ctypes.c_int64.from_address(id(array) + _SHAPE).value
    known += [(sizes + 8 * axis, _WORD) for axis in range(array.ndim)]
    return [(place, ctypes.c_int64.from_address(place).value, mask) for place, mask in known]
