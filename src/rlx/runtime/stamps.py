"""What a profiled program notes: which record ran on which thread from when to when, every time it ran.

Each thread has a part of one table of 8-byte fields: how many events it has had, then the events {record,
start, stop} for which there is room. A record of a loop runs many times: the program takes the events out at
every pause of the loop, and there is room for more than fit between two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlx.ir.weights import round_up
from rlx.runtime.memory import table

FIRST_EVENT = 8  # the number of events has its own cache line
EVENT_FIELDS = 3
_ROOM_IN_LOOPS = 1 << 20  # events; an event takes 50 ns or more, a loop pauses after 50 ms


class Stamps:
    """The events of one program's runs.

    >>> stamps = Stamps(threads=2, records=1, loops=False)
    >>> stamps.part(1)[0] = 1  # as the driver does it
    >>> stamps.part(1)[FIRST_EVENT:][:EVENT_FIELDS] = 0, 100, 250
    >>> stamps.events().tolist()
    [[1, 0, 100, 250]]
    """

    def __init__(self, threads: int, records: int, loops: bool) -> None:
        self.threads = threads
        self.room = max(records, _ROOM_IN_LOOPS) if loops else records
        self.stride = round_up(FIRST_EVENT + EVENT_FIELDS * self.room, 8)  # fields of one thread
        self._table = table(threads * self.stride)  # pages that nobody writes to take no memory
        self._taken: list[NDArray[np.int64]] = []

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)

    def part(self, thread: int) -> NDArray[np.int64]:
        """The fields of one thread."""
        return self._table[thread * self.stride :][: self.stride]

    def clear(self) -> None:
        """Begin anew."""
        self._taken = []
        self._table[:: self.stride] = 0

    def take(self) -> None:
        """Make room: keep what was noted since the last time."""
        for thread in range(self.threads):
            part = self.part(thread)
            count = min(int(part[0]), self.room)
            made = np.empty((count, 1 + EVENT_FIELDS), np.int64)
            made[:, 0] = thread
            made[:, 1:] = part[FIRST_EVENT:][: count * EVENT_FIELDS].reshape(count, EVENT_FIELDS)
            self._taken.append(made)
        self._table[:: self.stride] = 0

    def events(self) -> NDArray[np.int64]:
        """Rows of thread, record, start and stop (nanoseconds); thread by thread, each in its order."""
        self.take()
        found = np.concatenate(self._taken) if self._taken else np.empty((0, 1 + EVENT_FIELDS), np.int64)
        self._taken = [found[np.argsort(found[:, 0], kind="stable")]]
        return self._taken[0]
