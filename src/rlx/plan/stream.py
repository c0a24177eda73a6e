"""Weights that do not fit their budget: which stay in memory, and how the others go through a ring.

Some weights stay resident: small ones, then as many as leave room for the ring, spread over the program, so
that reading has something to do wherever a run is. The others are fetched in the order in which kernels read
them, into a ring of bytes. Kernels that follow each other and whose weights take little are one group: a run
stops only before the first kernel of a group, to wait for what it reads.

A large weight whose only reader can compute with a part of it (columns of a matmul) is fetched in parts, and
the kernel runs part by part. So the ring is small: what was read is still in the caches when it is used, and
more weights stay in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from rlx.config import bytes_text
from rlx.errors import BudgetError
from rlx.plan.lir import ALIGNMENT, LirBufferPlan, LirFetch, Point
from rlx.records import dataclass

SMALL = 64 << 10  # bytes up to which a weight stays resident before others
MOST_GROUP = 3 << 20  # bytes that kernels of one group read, and of a part; one kernel may read more
SHOWN = 12  # groups on the page of `explain`
GROUPS = 4  # at least, of those that are not single kernels, fit the ring


@dataclass(frozen=True)
class Streaming:
    """What goes through the ring and how; weights that are not fetched are resident, if they are read."""

    budget: int
    ring: int = 0
    fetches: tuple[LirFetch, ...] = ()
    unread: tuple[int, ...] = ()

    def to_json(self) -> list[object]:
        """Plain JSON values, which `from_json` reads back."""
        return [self.budget, self.ring, [list(astuple(f)) for f in self.fetches], list(self.unread)]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Streaming:
        budget, ring, fetches, unread = data
        return Streaming(budget, ring, tuple(LirFetch(*f) for f in fetches), tuple(unread))


def stream_weights(
    reads: Sequence[Sequence[int]],
    sizes: Mapping[int, int],
    budget: int,
    cuts: Mapping[int, int] | None = None,
) -> Streaming:
    """How weights of `sizes` (bytes by node) that each step `reads` fit a budget of bytes. Weights in `cuts`
    may be read in parts that begin at multiples of so many bytes.

    >>> plan = stream_weights([[0], [1], [2]], {0: 64, 1: 64, 2: 64}, budget=128)
    >>> plan.ring, [(f.node, f.offset, f.at, f.first) for f in plan.fetches]
    (128, [(0, 0, 0, 0), (1, 64, 0, 1), (2, 0, 1, 2)])
    >>> plan = stream_weights([[0]], {0: 256}, budget=128, cuts={0: 64})
    >>> [(f.begin, f.offset, f.starts) for f in plan.fetches]
    [(0, 0, (0, 0)), (64, 64, (0, 0)), (128, 0, (0, 1)), (192, 64, (0, 2))]
    """
    read = {node for step in reads for node in step}
    unread = tuple(node for node in sizes if node not in read)
    rooms = {node: _room(size) for node, size in sizes.items() if node in read}
    if sum(rooms.values()) <= budget:
        return Streaming(budget, unread=unread)
    needs = [{node: rooms[node] for node in dict.fromkeys(step)} for step in reads]
    once = [node for step in needs for node in step]
    allowed = {n: cut for n, cut in (cuts or {}).items() if once.count(n) == 1 and cut % ALIGNMENT == 0}
    leasts = [sum(min(room, allowed.get(n, room)) for n, room in need.items()) for need in needs]
    least = max(leasts, default=0)
    if least > budget:
        step = leasts.index(least)
        raise BudgetTooSmall(budget, least, step, list(needs[step]))
    parts = {n: part for need in needs for n, part in _parts(need, allowed, budget).items()}
    resident = _resident(needs, parts, budget)
    ring = (budget - sum(rooms[node] for node in resident)) // ALIGNMENT * ALIGNMENT
    streamed = [{n: room for n, room in need.items() if n not in resident} for need in needs]
    ring = min(ring, _useful_ring(streamed, parts, ring))
    return Streaming(budget, ring, tuple(_fetches(_groups(streamed, sizes, parts, ring), ring)), unread)


def _room(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _parts(need: Mapping[int, int], allowed: Mapping[int, int], budget: int) -> dict[int, int]:
    """Bytes of a part, for weights of one step that are better read in parts: all parts about as large."""
    found: dict[int, int] = {}
    for node, room in need.items():
        left = budget - sum(other for n, other in need.items() if n != node)
        if node in allowed and (room > MOST_GROUP or 2 * room > left):
            cut = allowed[node]
            most = max(1, min(MOST_GROUP, budget // 4, left) // cut)
            pieces = -(-room // cut)
            count = -(-pieces // most)
            found[node] = -(-pieces // count) * cut
    return found


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
        "       read  steps      begins at       weights",
    ]
    for first, fetches in list(groups.items())[:SHOWN]:
        size = bytes_text(sum(f.size for f in fetches))
        steps, at = f"{first} to {max(f.last for f in fetches)}", f"step {fetches[0].at}"
        if fetches[0].at_part:
            at += f", part {fetches[0].at_part}"
        whole = [f for f in fetches if not f.parts]
        parts = [f for f in fetches if f.parts]
        names = ", ".join(f"%{f.node} at {f.offset}" for f in whole[:4])
        names += f" and {len(whole) - 4} more" if len(whole) > 4 else ""
        if parts:
            places = " ".join(str(f.offset) for f in parts[:4]) + (" ..." if len(parts) > 4 else "")
            names += ", " * bool(names) + f"%{parts[0].node} in {len(parts)} parts at {places}"
        lines.append(f"  {size:>9}  {steps:<9}  {at:<14}  {names}")
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
    """Room for four times what the largest kernel, or part of one, reads, so that reading never stands still
    while a kernel computes; two must do where that would leave little of the budget to weights that are never
    read again."""
    return max(2 * largest, min(4 * largest, budget * 3 // 4))


def _in_ring(need: Mapping[int, int], parts: Mapping[int, int]) -> int:
    """Bytes of the ring that a kernel needs at once."""
    return sum(parts.get(node, room) for node, room in need.items())


def _useful_ring(streamed: Sequence[Mapping[int, int]], parts: Mapping[int, int], most: int) -> int:
    """Bytes of the ring beyond which nothing gains from more: a small one stays in the caches."""
    if not parts:
        return most
    largest = max(_in_ring(need, parts) for need in streamed)
    return max(4 * largest, GROUPS * MOST_GROUP)


def _resident(needs: Sequence[Mapping[int, int]], parts: Mapping[int, int], budget: int) -> set[int]:
    """Weights to keep: small ones if all fit, then others while the ring keeps its room: first evenly spread
    over the program, then, if there is room left, those that are read first."""
    rooms = {node: room for need in needs for node, room in need.items()}
    kept = {node for node, room in rooms.items() if room <= SMALL}
    taken = sum(rooms[node] for node in kept)

    def without(kept: set[int]) -> list[int]:
        return [_in_ring({n: r for n, r in need.items() if n not in kept}, parts) for need in needs]

    left = without(kept)
    if taken + max(left) > budget:
        kept, taken, left = set(), 0, without(set())
    readers: dict[int, list[int]] = {}
    for step, need in enumerate(needs):
        for node in need:
            readers.setdefault(node, []).append(step)

    def keep(node: int) -> bool:
        """Keep a weight if the ring then has its room."""
        nonlocal taken
        used = parts.get(node, rooms[node])
        for step in readers[node]:
            left[step] -= used
        if taken + rooms[node] + _ring_need(max(left), budget) > budget:
            for step in readers[node]:
                left[step] += used
            return False
        kept.add(node)
        taken += rooms[node]
        return True

    if parts:
        for node in [n for n in rooms if n not in kept and n not in parts and rooms[n] > MOST_GROUP]:
            keep(node)  # alone it would need a ring of several times its size
    others = [node for node in rooms if node not in kept]
    share = (budget - taken - _ring_need(max(left), budget)) / max(sum(rooms[n] for n in others), 1)
    seen = before = 0.0
    for node in others:  # in the order of the first reader
        seen += rooms[node]
        if before + rooms[node] <= share * seen and keep(node):
            before += rooms[node]
    for node in others:
        if node not in kept:
            keep(node)
    return kept


@dataclass(frozen=True)
class _Piece:
    """A weight or a part of one: what is fetched at once, and the last place where it is read."""

    node: int
    begin: int
    size: int
    room: int
    last: int
    part: int = 0
    parts: int = 0


@dataclass
class _Group:
    """Consecutive kernels, or one part of a kernel, that wait for their weights together."""

    first: Point
    pieces: dict[int, _Piece]  # by node

    @property
    def in_parts(self) -> bool:
        return any(piece.parts for piece in self.pieces.values())

    @property
    def size(self) -> int:
        return sum(piece.room for piece in self.pieces.values())


def _groups(
    needs: Sequence[Mapping[int, int]], sizes: Mapping[int, int], parts: Mapping[int, int], ring: int
) -> list[_Group]:
    """Kernels with streamed weights, joined while they read little; others run with those before them."""
    most = min(MOST_GROUP, ring // GROUPS)
    groups: list[_Group] = []
    for step, need in enumerate(needs):
        cut = next((node for node in need if node in parts), None)
        whole = {n: _Piece(n, 0, sizes[n], room, step) for n, room in need.items() if n != cut}
        if not need:
            continue
        if cut is not None:
            size, part = sizes[cut], parts[cut]
            begins = range(0, size, part)
            for number, begin in enumerate(begins):
                nbytes = min(part, size - begin)
                piece = _Piece(cut, begin, nbytes, _room(nbytes), step, number, len(begins))
                first = {cut: piece} if number else {**whole, cut: piece}
                groups.append(_Group((step, number), first))
            continue
        joins = bool(groups) and not groups[-1].in_parts
        known = groups[-1].pieces if joins else {}
        added = sum(piece.room for node, piece in whole.items() if node not in known)
        if not joins or groups[-1].size + added > most:
            groups.append(_Group((step, 0), {}))
        groups[-1].pieces.update(whole)
    return groups


def _fetches(groups: Sequence[_Group], ring: int) -> list[LirFetch]:
    """Places in the ring, one behind the other, and from which point of a run on each may be filled."""
    starts = [group.first for group in groups]
    out: list[LirFetch] = []
    alive: list[LirFetch] = []  # what may still be read when the next place can be filled
    cursor, at = 0, (0, 0)
    floor = 0  # what the parts of a kernel must not touch, because all of them read it
    for group in groups:
        step, part = group.first
        if part == 0:
            floor = sum(p.room for p in group.pieces.values() if not p.parts) if group.in_parts else 0
            cursor = 0 if floor else cursor
        rooms = {node: piece.room for node, piece in group.pieces.items()}
        places, cursor = _places(rooms, cursor, ring, floor if part else 0)
        made: list[LirFetch] = []
        for node, offset in places.items():
            piece = group.pieces[node]
            for f in alive:
                if f.offset < offset + piece.room and offset < f.offset + f.size:
                    at = max(at, starts[bisect.bisect_right(starts, f.ends)])  # the next group begins
            alive = [f for f in alive if f.ends >= at]
            place = (node, offset, piece.size, at[0], step, piece.last, piece.begin, part, piece.parts, at[1])
            made.append(LirFetch(*place))
        out += made
        alive += made
    return out


def _places(rooms: Mapping[int, int], cursor: int, ring: int, floor: int) -> tuple[dict[int, int], int]:
    """Offsets for a group from `cursor` on, past the end from `floor` on again, and the new cursor."""
    start, places, wrapped = cursor, dict[int, int](), False
    for node, room in rooms.items():
        if cursor + room > ring:
            cursor, wrapped = floor, True
        places[node] = cursor
        cursor += room
    if wrapped and cursor > start and start > floor:  # it bites its own tail: begin where it always fits
        return _places(rooms, floor, ring, floor)
    return places, cursor
