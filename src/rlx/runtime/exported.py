"""What `program.export` returns."""

from __future__ import annotations

from rlx.records import dataclass


@dataclass(frozen=True)
class Exported:
    """What an export wrote: files with their sizes, and what the program needs."""

    kind: str
    name: str
    target: str
    folder: str
    files: dict[str, int]
    ranges: dict[str, tuple[int, int]]
    memory: int
    """Bytes of a context for one thread, without weights."""
    weights: int
