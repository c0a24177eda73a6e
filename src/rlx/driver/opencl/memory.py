"""Memory of an OpenCL device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from rlx.driver.opencl.platform import cl, translated
from rlx.driver.region import Bytes, Memory

if TYPE_CHECKING:
    from rlx.driver.opencl.device import OpenCLDevice


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
