"""How many cores this process gets: a mask names them, a control group may give less time than they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from rlx.system import SYSTEM


def usable_cores() -> int:
    """Cores that this process may use at once, rounded up: what threads default to.

    >>> 1 <= usable_cores() <= len(SYSTEM.cpus())
    True
    """
    there = len(SYSTEM.cpus())
    quota = cpu_quota()
    return there if quota is None else max(1, min(there, math.ceil(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process get; None if there is no limit.

    The group itself and all above it may each have a limit, and the least holds. `root` is for tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limits += _limits(root / "sys/fs/cgroup", path, _second_version)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):  # the folder, or a link to it
                if (root / "sys/fs/cgroup" / name).is_dir():
                    limits += _limits(root / "sys/fs/cgroup" / name, path, _first_version)
                    break
    return min(limits, default=None)


def _limits(mount: Path, path: str, limit: Callable[[Path], float | None]) -> Iterator[float]:
    """Limits of a group and of those above it. A container may see its own group as the topmost one: what is
    not there under its full path is then looked for there."""
    inside = (part for part in path.split("/") if part != "..")  # which would lead out of the container
    group = PurePosixPath(*inside)
    for part in (group, *group.parents):
        found = limit(mount / part)
        if found is not None:
            yield found


def _second_version(folder: Path) -> float | None:
    """`cpu.max` has "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    return _ratio(_words(folder / "cpu.max"))


def _first_version(folder: Path) -> float | None:
    """Two files; a quota of -1 is none."""
    return _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _ratio(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])
