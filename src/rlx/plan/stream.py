"""Weights that do not fit their budget: which stay in memory, and how the others go through a ring.

Some weights stay resident: small ones, then, from the first kernel on, as many as leave room for the ring, so
that a run begins at once and reads less. The others are fetched in the order in which
kernels read them, into a ring of bytes. Kernels that follow each other and whose weights take little are one
group: a run stops only before the first kernel of a group, to wait for what it reads.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.config import bytes_text
from rlx.errors import BudgetError
from rlx.ir.lir import ALIGNMENT, LirBufferPlan, LirFetch

SMALL = 64 << 10  # bytes up to which a weight stays resident before others
MOST_GROUP = 4 << 20  # bytes that kernels of one group read; one kernel may read more
SHOWN = 12  # groups on the page of `explain`
GROUPS = 4  # at least, of those that are not single kernels, fit the ring


@dataclass(frozen=True)
class Streaming:
    """What goes through the ring and how; weights that are not fetched are resident, if they are read."""

    budget: int
    ring: int = 0
    fetches: tuple[LirFetch, ...] = ()
    unread: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """Plain JSON values, which `from_json` reads back."""
        fetches = [[f.node, f.offset, f.size, f.at, f.first, f.last] for f in self.fetches]
        return [self.budget, self.ring, fetches, list(self.unread)]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Streaming:
        budget, ring, fetches, unread = data
        return Streaming(budget, ring, tuple(LirFetch(*f) for f in fetches), tuple(unread))


def stream_weights(reads: Sequence[Sequence[int]], sizes: Mapping[int, int], budget: int) -> Streaming:
    """How weights of `sizes` (bytes by node) that each step `reads` fit a budget of bytes.

    >>> plan = stream_weights([[0], [1], [2]], {0: 64, 1: 64, 2: 64}, budget=128)
    >>> plan.ring, [(f.node, f.offset, f.at, f.first) for f in plan.fetches]
    (128, [(0, 0, 0, 0), (1, 64, 0, 1), (2, 0, 1, 2)])
    """
    read = {node for step in reads for node in step}
    unread = tuple(node for node in sizes if node not in read)
    rooms = {node: -(-size // ALIGNMENT) * ALIGNMENT for node, size in sizes.items() if node in read}
    if sum(rooms.values()) <= budget:
        return Streaming(budget, unread=unread)
    needs = [{node: rooms[node] for node in dict.fromkeys(step)} for step in reads]
    least = max((sum(need.values()) for need in needs), default=0)
    if least > budget:
        step = next(i for i, need in enumerate(needs) if sum(need.values()) == least)
        raise BudgetTooSmall(budget, least, step, list(needs[step]))
    resident = _resident(needs, budget)
    ring = (budget - sum(rooms[node] for node in resident)) // ALIGNMENT * ALIGNMENT
    streamed = [{n: room for n, room in need.items() if n not in resident} for need in needs]
    return Streaming(budget, ring, tuple(_fetches(_groups(streamed, ring), sizes, ring)), unread)


def stream_lines(plan: LirBufferPlan) -> list[str]:
    """The part of `explain` about streamed weights: each group, what it reads and when that is fetched."""
    groups: dict[int, list[LirFetch]] = {}
    for f in plan.fetches:
        groups.setdefault(f.first, []).append(f)
    if not groups:
        return []
    sizes = plan.sizes()
    total = sum(f.size for f in plan.fetches)
    lines = [
        f"Streamed weights: {bytes_text(total)} are read in every run, through a ring of "
        f"{bytes_text(sizes['ring'])}; {bytes_text(sizes['weight'])} stay in memory",
        "       read  steps      begins at  weights",
    ]
    for first, fetches in list(groups.items())[:SHOWN]:
        size = bytes_text(sum(f.size for f in fetches))
        steps, at = f"{first} to {max(f.last for f in fetches)}", f"step {fetches[0].at}"
        names = ", ".join(f"%{f.node} at {f.offset}" for f in fetches[:4])
        more = f" and {len(fetches) - 4} more" if len(fetches) > 4 else ""
        lines.append(f"  {size:>9}  {steps:<9}  {at:<9}  {names}{more}")
    if len(groups) > SHOWN:
        lines.append(f"  and {len(groups) - SHOWN} more groups; the plan's text lists every fetch")
    return lines


class BudgetTooSmall(BudgetError):
    """The weights of one kernel do not fit. The planner, which knows names, says it in full."""

    def __init__(self, budget: int, least: int, step: int, weights: Sequence[int]) -> None:
        self.budget, self.least, self.step, self.weights = budget, least, step, weights
        super().__init__(
            f"weight_budget is {budget} bytes, but one kernel reads {least} bytes of weights; "
            f"the smallest budget that works is {least}"
        )


def _ring_need(largest: int, budget: int) -> int:
    """Room for four times what the largest kernel reads, so that reading never stands still while a kernel
    computes; two must do where that would leave little of the budget to weights that are never read again."""
    return max(2 * largest, min(4 * largest, budget * 3 // 4))


def _resident(needs: Sequence[Mapping[int, int]], budget: int) -> set[int]:
    """Weights to keep: small ones if all fit, then those read first while the ring keeps its room."""
    rooms = {node: room for need in needs for node, room in need.items()}
    kept = {node for node, room in rooms.items() if room <= SMALL}
    taken = sum(rooms[node] for node in kept)
    left = [sum(room for node, room in need.items() if node not in kept) for need in needs]
    if taken + max(left) > budget:
        kept, taken, left = set(), 0, [sum(need.values()) for need in needs]
    readers: dict[int, list[int]] = {}
    for step, need in enumerate(needs):
        for node in need:
            readers.setdefault(node, []).append(step)
    for node, room in rooms.items():  # in the order of the first reader
        if node in kept:
            continue
        for step in readers[node]:
            left[step] -= room
        if taken + room + _ring_need(max(left), budget) <= budget:
            kept.add(node)
            taken += room
        else:
            for step in readers[node]:
                left[step] += room
    return kept


@dataclass
class _Group:
    """Consecutive kernels that wait for their weights together; weights with their room and last reader."""

    first: int
    rooms: dict[int, int]
    last: dict[int, int]


def _groups(needs: Sequence[Mapping[int, int]], ring: int) -> list[_Group]:
    """Kernels with streamed weights, joined while they read little; others run with those before them."""
    most = min(MOST_GROUP, ring // GROUPS)
    groups: list[_Group] = []
    for step, need in enumerate(needs):
        if not need:
            continue
        known = groups[-1].rooms if groups else {}
        added = sum(room for node, room in need.items() if node not in known)
        if not groups or sum(known.values()) + added > most:
            groups.append(_Group(step, {}, {}))
        groups[-1].rooms.update(need)
        groups[-1].last.update(dict.fromkeys(need, step))
    return groups


def _fetches(groups: Sequence[_Group], sizes: Mapping[int, int], ring: int) -> list[LirFetch]:
    """Places in the ring, one behind the other, and from which step on each may be filled."""
    starts = [group.first for group in groups]
    out: list[LirFetch] = []
    cursor = at = oldest = 0
    for group in groups:
        places, cursor = _places(group.rooms, cursor, ring)
        for node, offset in places.items():
            end = offset + group.rooms[node]
            for i in range(oldest, len(out)):
                before = out[i]
                if (
                    before.first != group.first
                    and before.offset < end
                    and offset < before.offset + before.size
                ):
                    free = starts[bisect.bisect_right(starts, before.last)]  # the next group begins
                    at, oldest = max(at, free), i + 1
            out.append(LirFetch(node, offset, sizes[node], at, group.first, group.last[node]))
    return out


def _places(rooms: Mapping[int, int], cursor: int, ring: int) -> tuple[dict[int, int], int]:
    """Offsets for a group from `cursor` on, past the end from 0 on again, and the new cursor."""
    start, places, wrapped = cursor, dict[int, int](), False
    for node, room in rooms.items():
        if cursor + room > ring:
            cursor, wrapped = 0, True
        places[node] = cursor
        cursor += room
    if wrapped and cursor > start and start:  # it bites its own tail: begin at 0, where it always fits
        return _places(rooms, 0, ring)
    return places, cursor
