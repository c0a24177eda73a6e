"""The version of the code generator, part of every cache key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def generator_version() -> str:
    """A digest of the source that decides about code: an edited one never meets an object of its predecessor.

    >>> len(generator_version())
    16
    """
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in ("backend/cpu", "ir", "ops"):  # emitters, the nests they get, the forms of ops
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
