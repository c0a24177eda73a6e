"""Command streams: work recorded in order, started by `submit`, finished by `wait`.

`submit` returns an `Event`. Another stream that calls `wait_for(event)` runs its later commands after it. An
event exists only for work already submitted, so streams cannot wait for each other in a circle.
Errors of the work surface at `wait`; after that the stream is usable again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.driver.copy.engine import copy_on_host
from rlx.driver.region import HostMemory, Tile, Transfer, plan_transfer
from rlx.errors import DeviceError, RlxError


class Event(ABC):
    """The end of one submitted batch of commands."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the batch has ended, well or not."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the batch has ended; raise its error if it failed."""


class CommandStream(ABC):
    """Commands in order on one device. Recording checks arguments; nothing runs before `submit`."""

    device: str

    @abstractmethod
    def copy(self, src: object, dst: object, nbytes: int | None = None) -> None:
        """Record a copy between tiles, buffers or arrays, of the host or this device."""

    @abstractmethod
    def fill(self, dst: object, byte: int = 0) -> None:
        """Record setting every byte of `dst` to `byte`."""

    @abstractmethod
    def call(self, function: Callable[[], object]) -> None:
        """Record a call of a host function, after the commands before it and before those behind it."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Record that later commands run after `event`, of this or another stream or device."""

    @abstractmethod
    def submit(self) -> Event:
        """Start what was recorded since the last submit."""

    @abstractmethod
    def wait(self) -> None:
        """Return when everything submitted has ended; raise the first error, once."""

    def submit_and_wait(self) -> None:
        """`submit`, then `wait`."""
        self.submit()
        self.wait()

    def close(self) -> None:
        """Finish the work and give up the stream."""
        self.wait()


def check_fill(dst: object, byte: int) -> Tile:
    """The tile of a fill, checked: one piece, writable, a value that is a byte."""
    tile = Tile.of(dst)
    if not 0 <= byte <= 255:
        raise DeviceError(f"a fill needs a byte of 0..255, not {byte}")
    if tile.memory.readonly or not tile.contiguous:
        raise DeviceError("a fill needs writable memory in one piece")
    return tile


class SyncEvent(Event):
    """A batch that ended inside `submit`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise as_device_error(self.error)


class SyncStream(CommandStream):
    """Host execution: `submit` runs the commands on the calling thread, one after the other.

    A command that fails ends its batch; the error is raised by `wait`.

    >>> import numpy as np
    >>> stream, out = SyncStream(), np.zeros(2, np.int32)
    >>> stream.copy(np.int32([3, 4]), out)
    >>> before = out.tolist(); stream.submit_and_wait(); before, out.tolist()
    ([0, 0], [3, 4])
    """

    device = "cpu"

    def __init__(self) -> None:
        self._recorded: list[Callable[[], object]] = []
        self._error: BaseException | None = None

    def copy(self, src: object, dst: object, nbytes: int | None = None) -> None:
        transfer = plan_transfer(src, dst, nbytes)
        _host_only(transfer)
        self._recorded.append(lambda: copy_on_host(transfer))

    def fill(self, dst: object, byte: int = 0) -> None:
        tile = check_fill(dst, byte)
        memory = tile.memory
        if not isinstance(memory, HostMemory):
            raise DeviceError(
                f"a host stream cannot fill {memory.device} memory; use a stream of that device"
            )
        self._recorded.append(lambda: memory.bytes[tile.offset : tile.offset + tile.nbytes].fill(byte))

    def call(self, function: Callable[[], object]) -> None:
        self._recorded.append(function)

    def wait_for(self, event: Event) -> None:
        self._recorded.append(event.wait)

    def submit(self) -> Event:
        commands, self._recorded = self._recorded, []
        error: BaseException | None = None
        try:
            for command in commands:
                command()
        except Exception as failure:
            error = failure
            self._error = self._error or failure
        return SyncEvent(error)

    def wait(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise as_device_error(error)


def as_device_error(error: BaseException) -> RlxError:
    """Errors of RLX as they are; others, such as those of a host function, named as what they are."""
    if isinstance(error, RlxError):
        return error
    wrapped = DeviceError(f"a host function in a stream raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _host_only(transfer: Transfer) -> None:
    for tile in (transfer.src, transfer.dst):
        if tile.memory.device not in ("cpu", "file"):
            raise DeviceError(
                f"a host stream cannot copy {tile.memory.device} memory; use a stream of that device"
            )
