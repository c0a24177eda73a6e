"""Which cores a rank of this machine gets: its share of those that the job may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.system import SYSTEM

_bound = False


def share(rank: int, ranks: int, cpus: Sequence[int], core_of: Callable[[int], object]) -> list[int]:
    """The logical CPUs of one rank: whole cores where there are enough, all of them if there are too few.

    >>> share(1, 2, range(8), core_of=lambda cpu: cpu % 4)  # CPU 4 is the second thread of core 0
    [2, 3, 6, 7]
    >>> share(1, 3, range(2), core_of=lambda cpu: cpu)
    [0, 1]
    """
    cores: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(core_of(cpu), []).append(cpu)
    units = list(cores.values()) if ranks <= len(cores) else [[cpu] for cpu in sorted(cpus)]
    if ranks > len(units):
        return sorted(cpus)
    mine = units[rank * len(units) // ranks : (rank + 1) * len(units) // ranks]
    return sorted(cpu for unit in mine for cpu in unit)


def share_here(rank: int, ranks: int) -> list[int]:
    """The share of a rank of the CPUs that this process may use."""
    return share(rank, ranks, SYSTEM.cpus(), SYSTEM.core_of)


def bind(rank: int, ranks: int) -> None:
    """Let this process run on its share only, if every rank can have its own CPU."""
    global _bound
    mine = share_here(rank, ranks)
    if mine and ranks <= len(SYSTEM.cpus()):
        SYSTEM.pin(0, mine)
        _bound = True


def roomy(ranks: int) -> bool:
    """Whether every rank can have its own CPU, so that a waiting rank need not yield it."""
    return _bound or ranks <= len(SYSTEM.cpus())
