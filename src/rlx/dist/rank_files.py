"""The files of a sharded program: their names, and what each says of its rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.dist.program import RankProgram

FACT = "ranks"
"""Under this name a file's header says whose it is."""


def rank_file(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """The file of one rank.

    >>> rank_file("minilm.rlx", 0, 2).name
    'minilm.0of2.rlx'
    """
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.{rank}of{ranks}{whole.suffix}")


def described(program: RankProgram) -> dict[str, object]:
    """What a file must hold besides the plan to be that rank's again."""
    sharded = program.sharded
    return {
        "mesh": dict(sharded.mesh.axes),
        "rank": int(program.transport.this_rank),
        "parts": {name: [list(cut) for cut in cuts] for name, cuts in sharded.parts.items()},
        "inserted": [str(note) for note in sharded.inserted],
    }
