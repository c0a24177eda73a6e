"""The OpenCL device itself and its memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from rlx.driver.arena import Arena, ArenaSlot, arena_size
from rlx.driver.device import Capabilities, Device
from rlx.driver.opencl.copy import QueueCopy
from rlx.driver.opencl.platform import cl, find, translated
from rlx.driver.opencl.stream import OpenCLStream
from rlx.driver.region import Bytes, Memory
from rlx.errors import CompileError, DeviceError, UnsupportedError
from rlx.runtime.memory import round_up


class OpenCLMemory(Memory):
    """A device buffer. The host reaches it by copies only."""

    device = "opencl"

    def __init__(self, owner: OpenCLDevice, nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        with translated(owner, f"allocate {nbytes} bytes"):
            self.handle = cl().Buffer(owner.context, cl().mem_flags.READ_WRITE, size=max(1, nbytes))
            if nbytes:
                cl().enqueue_fill_buffer(owner.queue, self.handle, np.uint8(0), 0, nbytes).wait()

    def read(self, offset: int, nbytes: int) -> Bytes:
        self.check_range(offset, nbytes)
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            with translated(self.owner, f"read {nbytes} bytes"):
                cl().enqueue_copy(self.owner.queue, data, self.handle, src_offset=offset, is_blocking=True)
        return data

    def write(self, offset: int, data: Bytes) -> None:
        self.check_range(offset, data.nbytes)
        if data.nbytes:
            with translated(self.owner, f"write {data.nbytes} bytes"):
                cl().enqueue_copy(self.owner.queue, self.handle, data, dst_offset=offset, is_blocking=True)

    def place(self, offset: int) -> tuple[Hashable, int]:
        return ("opencl", self.handle.int_ptr), offset


class OpenCLDevice(Device):
    """One OpenCL device in a context of its own. Its memory counts as discrete even where it is not."""

    name = "opencl"

    def __init__(self) -> None:
        self._lost = False
        self.handle = find()
        with translated(self, "open"):
            self.context = cl().Context([self.handle])
            self.queue = cl().CommandQueue(self.context)  # for blocking transfers
        self.capabilities = Capabilities(
            description=f"{self.handle.name.strip()} ({self.handle.platform.name.strip()})",
            unified_memory=False,
            alignment=max(64, self.handle.mem_base_addr_align // 8),
            max_allocation=self.handle.max_mem_alloc_size,
            total_memory=self.handle.global_mem_size,
            compute_units=self.handle.max_compute_units,
            float16="cl_khr_fp16" in self.handle.extensions,
            float64="cl_khr_fp64" in self.handle.extensions,
        )
        self._programs: dict[str, Any] = {}

    @property
    def lost(self) -> bool:
        return self._lost

    def mark_lost(self) -> None:
        """Remember that the device is gone; everything on it refuses from now on."""
        self._lost = True

    def allocate(self, nbytes: int) -> OpenCLMemory:
        return OpenCLMemory(self, nbytes)

    def arena(
        self,
        slots: Mapping[int, ArenaSlot],
        size: int | None = None,
        alignment: int | None = None,
        guard: bool = False,
    ) -> Arena:
        if guard:
            raise UnsupportedError(
                "OpenCL memory has no guard pages; make this arena without guard, or on the cpu"
            )
        alignment = alignment or self.capabilities.alignment
        needed = arena_size(slots) if size is None else size
        return Arena(self.allocate(round_up(needed, alignment)), slots, needed, alignment)

    def stream(self) -> OpenCLStream:
        return OpenCLStream(self)

    def copy_engine(self) -> QueueCopy:
        return QueueCopy(self)

    def build(self, source: str, name: str) -> Any:
        """The kernel `name` of OpenCL C text, compiled once per text."""
        program = self._programs.get(source)
        if program is None:
            try:
                with translated(self, f"build kernel {name}"):
                    program = self._programs[source] = cl().Program(self.context, source).build()
            except DeviceError as error:
                if getattr(error.__cause__, "code", None) != cl().status_code.BUILD_PROGRAM_FAILURE:
                    raise
                raise CompileError(
                    f"OpenCL C of kernel {name} does not compile: {error.__cause__}"
                ) from error
        return cl().Kernel(program, name)
