"""API keys: read from a file that only its owner can read, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable

from rlx.errors import ConfigError
from rlx.files import file_boundary, open_plain
from rlx.system import SYSTEM

_MOST = 1 << 16  # bytes of a file
_LEAST = 8  # characters of a key


class Keys:
    """Keys that requests may have; without any, all requests are accepted.

    >>> keys = Keys(["correct horse"])
    >>> keys.accept("correct horse"), keys.accept("battery staple"), Keys([]).accept(None)
    (True, False, True)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, given: str | None) -> bool:
        """Whether a key is one of these. How long it takes does not depend on how much of it is right."""
        if not self._digests:
            return True
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, _digest(given or ""))
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """The keys of a file: one on each line; empty lines and those that begin with # are skipped."""
    with file_boundary(path, "file of API keys"), open_plain(path) as file:
        status = os.fstat(file.fileno())
        user = SYSTEM.user_id()
        if user is not None and (status.st_mode & 0o077 or status.st_uid not in (0, user)):
            raise ConfigError(f"{path} can be read by others; run: chmod 600 {path}")
        text = file.read(_MOST + 1)
        if len(text) > _MOST:
            raise ConfigError(f"{path} has more than {_MOST} bytes; it must have one API key on each line")
        lines = [line.strip() for line in text.decode("ascii").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path} has no API key; write one on a line of its own")
    short = [i for i, key in enumerate(found, 1) if len(key) < _LEAST or not key.isprintable() or " " in key]
    if short:
        raise ConfigError(
            f"{path}: key number {short[0]} must have {_LEAST} characters or more, and no spaces between them"
        )
    return Keys(found)
