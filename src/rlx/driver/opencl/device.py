"""The OpenCL device itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlx.driver.arena import Arena, ArenaSlot, arena_size
from rlx.driver.base import Capabilities, Device
from rlx.driver.opencl.copy import QueueCopy
from rlx.driver.opencl.memory import OpenCLMemory
from rlx.driver.opencl.platform import cl, find, translated
from rlx.driver.opencl.stream import OpenCLStream
from rlx.errors import CompileError, DeviceError, UnsupportedError

if TYPE_CHECKING:
    from pyopencl import Kernel, Program


class OpenCLDevice(Device):
    """One OpenCL device in its own context. Its memory counts as discrete even where it is not."""

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
        self._programs: dict[str, Program] = {}
        self._kernels: dict[str, Program] = {}  # kernel -> program that defines it
        self._building = threading.Lock()

    @property
    def lost(self) -> bool:
        return self._lost

    def mark_lost(self) -> None:
        """Remember that the device is gone; everything on it refuses from now on."""
        self._lost = True

    def allocate(self, nbytes: int) -> OpenCLMemory:
        if nbytes > self.capabilities.max_allocation:
            raise DeviceError(
                f"cannot allocate {nbytes} bytes: the OpenCL device gives at most "
                f"{self.capabilities.max_allocation} in one piece"
            )
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
        return Arena(self.allocate(needed), slots, needed, alignment)

    def stream(self) -> OpenCLStream:
        return OpenCLStream(self)

    def copy_engine(self) -> QueueCopy:
        return QueueCopy(self)

    def build(self, source: str, name: str) -> Kernel:
        """The kernel `name` of OpenCL C text, compiled once per text."""
        if source not in self._programs:
            self._programs[source] = self._compile(source, f"kernel {name}")
        return cl().Kernel(self._programs[source], name)

    def ensure(self, names: Iterable[str], write: Callable[[Sequence[str]], str]) -> None:
        """Compile those of the named kernels that are not there yet, all in one program.

        `write(names)` gives its text. A name must stand for one text only, as a digest does.
        """
        with self._building:
            new = [name for name in dict.fromkeys(names) if name not in self._kernels]
            if new:
                program = self._compile(write(new), f"{len(new)} kernels")
                self._kernels |= dict.fromkeys(new, program)

    def kernel(self, name: str) -> Kernel:
        """A kernel that `ensure` compiled, with its own arguments."""
        with translated(self, f"make kernel {name}"):
            return cl().Kernel(self._kernels[name], name)

    def _compile(self, source: str, what: str) -> Program:
        exact = self.handle.single_fp_config & cl().device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        options = ["-w", *["-cl-fp32-correctly-rounded-divide-sqrt"] * bool(exact)]
        try:
            with translated(self, f"build {what}"):
                return cl().Program(self.context, source).build(options)
        except DeviceError as error:
            if getattr(error.__cause__, "code", None) != cl().status_code.BUILD_PROGRAM_FAILURE:
                raise
            raise CompileError(f"OpenCL C of {what} does not compile: {error.__cause__}") from error
