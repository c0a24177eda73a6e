"""Windows: files are locked by ranges of bytes, and there is no POSIX. Not tested on hardware."""

from __future__ import annotations

import errno
import os
from typing import IO

from rlx.system.base import System

_FAR = 1 << 42  # a byte that no file of RLX has: a lock on it keeps nobody from reading


class Windows(System):
    """Windows."""

    name = "Windows"
    renames_open_files = False

    def lock(self, file: IO[bytes] | IO[str], wait: bool = True) -> bool:
        import msvcrt  # which other systems, where the examples of all modules are run, do not have

        number = file.fileno()
        while True:
            before = os.lseek(number, 0, os.SEEK_CUR)
            os.lseek(number, _FAR, os.SEEK_SET)
            try:
                # It gives up after ten seconds, so that waiting is asking again.
                msvcrt.locking(number, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
                return True
            except OSError as error:
                if not wait or error.errno != errno.EDEADLK:
                    return False
            finally:
                os.lseek(number, before, os.SEEK_SET)
