"""Where buffers are in the symmetric heap.

Every rank runs its own copy of this allocator. It depends on nothing but the sequence of calls, so ranks that
allocate alike get the same offsets without talking to each other.
"""

from __future__ import annotations

from rlx.dist.errors import TransportError

LINE = 64
PAGE = 4096


class SymmetricAllocator:
    """First fit over a sorted list of free ranges; neighbours are merged when freed.

    >>> heap = SymmetricAllocator(1 << 16)
    >>> first, second = heap.alloc(100), heap.alloc(100)
    >>> heap.free(first); heap.alloc(64) == first
    True
    """

    def __init__(self, heap_size: int) -> None:
        self.heap_size = heap_size
        # Whole lines, so that the last bytes of an odd heap can be given out too.
        self._free: list[tuple[int, int]] = [(0, -(-heap_size // LINE) * LINE)] if heap_size else []
        self._used: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        """Offset of `nbytes` new bytes, aligned to a cache line, or to a page when they fill one."""
        if nbytes < 0:
            raise TransportError(f"cannot allocate {nbytes} bytes; ask for 0 or more")
        align = PAGE if nbytes >= PAGE else LINE
        # Empty buffers get their own line, so that every buffer has its own offset.
        size = -(-max(nbytes, 1) // LINE) * LINE
        for index, (start, end) in enumerate(self._free):
            offset = -(-start // align) * align
            if offset + size <= end and offset + nbytes <= self.heap_size:
                pieces = [(start, offset), (offset + size, end)]
                self._free[index : index + 1] = [(a, b) for a, b in pieces if a < b]
                self._used[offset] = size
                return offset
        free = self.heap_size - sum(self._used.values())
        raise TransportError(
            f"the symmetric heap has no room for {nbytes} bytes: {free} of {self.heap_size} bytes are free, "
            "not all in one piece; free buffers or create the transport with a larger heap_size"
        )

    def free(self, offset: int) -> None:
        """Give back what `alloc` gave."""
        size = self._used.pop(offset, None)
        if size is None:
            raise TransportError(f"there is no buffer at offset {offset}, or it is already freed; free each buffer once")
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, (offset, offset + size)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged
