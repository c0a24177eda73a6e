"""macOS: POSIX, but code is not run there. Not tested on hardware."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlx.system.posix import Posix

if TYPE_CHECKING:
    import numpy as np


class MacOS(Posix):
    """macOS. Pages of code need a permission of their own there, and its calls differ from those of Linux."""

    name = "macOS"

    def read_at(self, descriptor: int, out: np.ndarray, offset: int) -> int:
        data = os.pread(descriptor, out.nbytes, offset)  # it has preadv only since version 11
        out.data[: len(data)] = data
        return len(data)
