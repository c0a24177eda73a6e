"""The version of the code generator, part of every cache key."""

from __future__ import annotations

import functools
import hashlib
import os


@functools.cache
def generator_version() -> str:
    """A digest of the source that decides about code: an edited one never meets an object of its predecessor.

    >>> len(generator_version())
    16
    """
    digest = hashlib.sha256()
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    for part in ("backend/cpu", "ir", "ops"):  # emitters, the nests they get, the forms of ops
        # With os, not pathlib: every start reads all of it.
        for folder, folders, names in os.walk(os.path.join(root, part)):
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            for name in sorted(n for n in names if n.endswith(".py")):
                path = os.path.join(folder, name)
                with open(path, "rb", buffering=0) as file:
                    digest.update(path[len(root) :].replace(os.sep, "/").encode() + b"\0" + file.readall())
    return digest.hexdigest()[:16]
