"""A folder that gets its files when all are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlx.files import unfinished_name


@contextmanager
def filling(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write to; its files go to `folder` when the block ends without an error, else nothing does.

    Other files of `folder` stay. Files of the same names are removed before the first new one is there, so
    old and new ones are never mixed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with filling(parent + "/made") as there:
    ...         _ = (there / "a").write_text("whole")
    ...     os.listdir(parent), os.listdir(parent + "/made")
    (['made'], ['a'])
    """
    target = Path(folder)
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    there = unfinished_name(target / "export")  # inside: the folder may be a file system of its own
    try:
        there.mkdir()
        yield there
        _move(there, target)
    except BaseException:
        shutil.rmtree(there, ignore_errors=True)
        if is_new and not any(target.iterdir()):
            target.rmdir()
        raise


def _move(there: Path, target: Path) -> None:
    made = sorted(there.iterdir())
    for old in (target / entry.name for entry in made):
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    for entry in made:
        os.replace(entry, target / entry.name)
    there.rmdir()
