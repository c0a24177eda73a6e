"""`QueueCopy`: asynchronous copies to, from and inside an OpenCL device, on a separate queue."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from rlx.driver.copy.engine import CopyEngine
from rlx.driver.opencl import transfer as commands
from rlx.driver.opencl.platform import cl, translated
from rlx.driver.region import Transfer
from rlx.errors import CopyError, DeviceError

if TYPE_CHECKING:
    from pyopencl import Event

    from rlx.driver.opencl.device import OpenCLDevice


class QueueCopy(CopyEngine):
    """The engine of an OpenCL device. Copies run in order in one queue, concurrently with its streams."""

    def __init__(self, device: OpenCLDevice) -> None:
        super().__init__()
        self._device = device
        with translated(device, "make a copy queue"):
            self._queue = cl().CommandQueue(
                device.context, properties=cl().command_queue_properties.PROFILING_ENABLE
            )
        # Transfers under way with their events; dropping an event of a host copy would wait for it.
        self._pending: deque[tuple[Transfer, list[Event]]] = deque()

    def _accept(self, transfer: Transfer) -> None:
        commands.accept(self._device, transfer)

    def _start(self, ticket: int, transfer: Transfer) -> None:
        with translated(self._device, f"copy {transfer.nbytes} bytes"):
            events = commands.enqueue(self._queue, transfer)
            self._queue.flush()
        self._pending.append((transfer, events))

    def _finished(self) -> int:
        complete = cl().command_execution_status.COMPLETE
        while self._pending:
            transfer, events = self._pending[0]
            if any(event.command_execution_status > complete for event in events):
                break
            self._pending.popleft()
            self._book(self._copies + 1, transfer.nbytes, *self._outcome(transfer, events))
        return self._copies

    def _outcome(self, transfer: Transfer, events: list[Event]) -> tuple[float, CopyError | None]:
        """Seconds taken and the error, if it failed."""
        try:
            with translated(self._device, f"copy {transfer.nbytes} bytes"):
                for event in events:
                    event.wait()  # it has ended: this only reports a failure
                return sum(event.profile.end - event.profile.start for event in events) / 1e9, None
        except DeviceError as error:
            failure = CopyError(error.message)
            failure.__cause__ = error
            return 0.0, failure

    def _block(self, ticket: int) -> None:
        with self._lock:
            under_way = itertools.islice(self._pending, max(0, ticket - self._copies))
            events = [event for _, some in under_way for event in some]
        for event in events:
            try:
                event.wait()
            except cl().Error:
                pass  # `_finished` books it as the failure of this copy
