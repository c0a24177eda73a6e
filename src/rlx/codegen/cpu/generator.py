"""The version of the code generator, part of every cache key."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence

FOLDERS = ("codegen", "cost", "ir", "kernel", "ops", "plan", "rewrite", "system", "target")
"""What the code generator imports, directly or not; modules outside these folders count, too."""


@functools.cache
def generator_version() -> str:
    """A digest of the source that decides about code: an edited one never meets an object of its predecessor.

    >>> len(generator_version())
    16
    """
    return source_version(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def source_version(root: str, parts: Sequence[str] = ("", *FOLDERS)) -> str:
    """The digest of folders of a source tree; "" stands for the modules at its root."""
    digest = hashlib.sha256()
    # With os, not pathlib: every start reads all of it.
    for part in parts:
        for folder, folders, names in os.walk(os.path.join(root, part)):
            folders[:] = sorted(f for f in folders if f != "__pycache__") if part else []
            for name in sorted(n for n in names if n.endswith(".py")):
                path = os.path.join(folder, name)
                with open(path, "rb", buffering=0) as file:
                    digest.update(path[len(root) :].replace(os.sep, "/").encode() + b"\0" + file.readall())
    return digest.hexdigest()[:16]
