"""What `program.export` takes and returns."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.files import Json
from rlx.records import dataclass, field


@dataclass(frozen=True)
class Page:
    """A page for a model in the browser: its kind ("model" fits all), its title, settings for its script, and
    data files that it reads.

    >>> Page(title="Sums").kind
    'model'
    """

    kind: str = "model"
    title: str | None = None
    settings: Json = field(default_factory=dict)
    data: Mapping[str, bytes] = field(default_factory=dict)


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
