"""Command streams of an OpenCL device: in-order queues with events between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.driver.opencl import transfer as commands
from rlx.driver.opencl.memory import OpenCLMemory
from rlx.driver.opencl.platform import cl, translated
from rlx.driver.region import plan_transfer
from rlx.driver.stream import CommandStream, Event, as_device_error, check_fill
from rlx.errors import DeviceError, RlxError

if TYPE_CHECKING:
    from pyopencl import Event as ClEvent
    from pyopencl import Kernel

    from rlx.driver.opencl.device import OpenCLDevice


class OpenCLEvent(Event):
    """The end of a batch: a marker behind its commands, or the error that kept it from being enqueued."""

    def __init__(self, device: OpenCLDevice, marker: ClEvent | None, error: RlxError | None) -> None:
        self._device = device
        self.marker = marker
        self.error = error

    def done(self) -> bool:
        if self.marker is None:
            return True
        return bool(self.marker.command_execution_status <= cl().command_execution_status.COMPLETE)

    def wait(self) -> None:
        if self.marker is not None:
            with translated(self._device, "wait for an event"):
                self.marker.wait()
        if self.error is not None:
            raise self.error


class OpenCLStream(CommandStream):
    """An in-order queue. Host functions in it are sync points: `submit` waits for the queue before each.

    `sync_points` counts them.
    """

    device = "opencl"

    def __init__(self, device: OpenCLDevice) -> None:
        self._device = device
        with translated(device, "make a command queue"):
            self._queue = cl().CommandQueue(device.context)
        self._recorded: list[Callable[[], list[ClEvent]]] = []
        self._running: list[tuple[list[ClEvent], object]] = []  # events with what their commands use
        self._error: RlxError | None = None
        self.sync_points = 0

    def copy(self, src: object, dst: object, nbytes: int | None = None) -> None:
        transfer = plan_transfer(src, dst, nbytes)
        commands.accept(self._device, transfer)
        self._record(lambda: commands.enqueue(self._queue, transfer), transfer)

    def fill(self, dst: object, byte: int = 0) -> None:
        tile = check_fill(dst, byte)
        memory = tile.memory
        if not isinstance(memory, OpenCLMemory):
            raise DeviceError(
                f"an OpenCL stream cannot fill {memory.device} memory; use a stream of that device"
            )
        pattern = np.uint8(byte)
        if tile.nbytes:
            self._record(
                lambda: [
                    cl().enqueue_fill_buffer(self._queue, memory.handle, pattern, tile.offset, tile.nbytes)
                ],
                memory,
            )

    def launch(
        self,
        kernel: Kernel,
        arguments: Sequence[OpenCLMemory | np.generic] | None,
        global_size: Sequence[int],
        local_size: Sequence[int] | None = None,
    ) -> None:
        """Record a run of a kernel from `OpenCLDevice.build`. Arguments are memories and NumPy scalars; None
        keeps those that `set_arguments` gave it.
        """
        given = () if arguments is None else tuple(arguments)

        def enqueue() -> list[ClEvent]:
            if arguments is not None:
                set_arguments(kernel, given)
            size = tuple(local_size) if local_size else None
            return [cl().enqueue_nd_range_kernel(self._queue, kernel, tuple(global_size), size)]

        self._record(enqueue, (kernel, given))

    def call(self, function: Callable[[], object]) -> None:
        def run() -> list[ClEvent]:
            self._queue.finish()
            self.sync_points += 1
            function()
            return []

        self._record(run, function)

    def wait_for(self, event: Event) -> None:
        def order() -> list[ClEvent]:
            if isinstance(event, OpenCLEvent) and event.marker is not None and event.error is None:
                return [cl().enqueue_barrier(self._queue, wait_for=[event.marker])]
            event.wait()
            return []

        self._record(order, event)

    def submit(self) -> Event:
        recorded, self._recorded = self._recorded, []
        self._forget_finished()
        marker: ClEvent | None = None
        error: RlxError | None = None
        try:
            with translated(self._device, "submit commands"):
                for command in recorded:
                    command()
                marker = cl().enqueue_marker(self._queue)
                self._queue.flush()
        except Exception as failure:
            error = as_device_error(failure)
            self._error = self._error or error
        return OpenCLEvent(self._device, marker, error)

    def wait(self) -> None:
        error, self._error = self._error, None
        try:
            with translated(self._device, "finish a stream"):
                self._queue.finish()
        except DeviceError as late:
            error = error or late
        self._running.clear()
        if error is not None:
            raise error

    def _record(self, command: Callable[[], list[ClEvent]], uses: object) -> None:
        def run() -> list[ClEvent]:
            events = command()
            self._running.append((events, uses))
            return events

        self._recorded.append(run)

    def _forget_finished(self) -> None:
        complete = cl().command_execution_status.COMPLETE
        self._running = [
            (events, uses)
            for events, uses in self._running
            if any(event.command_execution_status > complete for event in events)
        ]


def set_arguments(kernel: Kernel, arguments: Sequence[OpenCLMemory | np.generic]) -> None:
    """Give a kernel its arguments. It does not keep memories alive: the caller does."""
    kernel.set_args(*[a.handle if isinstance(a, OpenCLMemory) else a for a in arguments])
