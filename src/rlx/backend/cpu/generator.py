"""The version of the code generator, part of every cache key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def generator_version() -> str:
    """A digest of the generator's own source: an edited emitter never meets an object of its predecessor.

    >>> len(generator_version())
    16
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.relative_to(Path(__file__).parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
