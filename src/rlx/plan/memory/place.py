"""Static memory placement: give every block an offset so that blocks alive together never overlap.

This is two-dimensional packing with the time axis fixed: every block is a rectangle, `first..last` steps wide
and `size` bytes tall, that may only slide along the byte axis. Optimal packing is NP-hard, but the graphs of
real models are kind: placing blocks one by one at the lowest free offset, in a good order, reaches the lower
bound most times. So: try a few orders, keep the best, and improve it by a bounded, seeded search only while
it is above the bound.

Any valid placement is the lowest-offset placement of its blocks in ascending order of offset (or that one is
tighter). So every placement is remembered as an order, and `replay` finds offsets for new sizes by one pass.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlx.errors import PlanError
from rlx.records import dataclass

ALIGNMENT = 64

# The search stops after so many looks at a neighbour (some 60 ms): a count and not a time, so that every
# machine finds the same plan.
SEARCH_LOOKS = 200_000
_SEARCH_STARTS = 3
_SEARCH_SEED = 0x524C58


@dataclass(frozen=True, slots=True)
class Block:
    """`size` bytes that hold a value from step `first` to step `last`, both included.

    `offset` fixes the place of the block; `None` lets the planner choose.
    """

    key: int
    size: int
    first: int
    last: int
    alignment: int = ALIGNMENT
    offset: int | None = None

    @property
    def room(self) -> int:
        """The bytes that the block takes up: its size rounded up to its alignment.

        >>> Block(0, 100, 0, 1).room
        128
        """
        return -(-self.size // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets by key, the bytes needed, the proven bound, what found it, and the order for `replay`.

    >>> plan = place([Block(0, 64, 0, 1), Block(1, 128, 1, 2), Block(2, 64, 2, 3)])
    >>> plan.total, plan.lower_bound, plan.ratio, plan.heuristic
    (192, 192, 1.0, 'size')
    """

    offsets: dict[int, int]
    total: int
    lower_bound: int
    heuristic: str
    order: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Bytes needed over the lower bound; 1.0 is optimal."""
        return self.total / self.lower_bound if self.lower_bound else 1.0


def place(blocks: Iterable[Block], search_looks: int = SEARCH_LOOKS) -> Placement:
    """The best placement that the heuristics and the search find; the same on every machine.

    >>> place([Block(7, 100, 0, 2), Block(8, 50, 1, 1), Block(9, 50, 2, 3)]).offsets
    {7: 0, 8: 128, 9: 128}
    """
    problem = _Problem(blocks)
    problem.check_fixed()
    found: list[_Packing] = []
    for packing in _attempts(problem, search_looks):
        found.append(packing)
        if packing.total <= problem.lower_bound:
            break
    return problem.placement(min(found, key=lambda packing: packing.total))


def replay(order: Sequence[int], blocks: Iterable[Block]) -> Placement:
    """Place `blocks` at their lowest free offsets in the `order` of an earlier `Placement`, without a search.

    The keys are those of the earlier blocks (fixed blocks are not part of the order); sizes may differ. The
    result is valid for any sizes, and no larger than the earlier placement for the earlier ones.

    >>> old = place([Block(0, 64, 0, 1), Block(1, 128, 1, 2), Block(2, 64, 2, 3)])
    >>> replay(old.order, [Block(0, 640, 0, 1), Block(1, 1280, 1, 2), Block(2, 640, 2, 3)]).total
    1920
    """
    problem = _Problem(blocks)
    positions = {problem.blocks[index].key: index for index in problem.movable}
    if len(order) != len(positions) or not positions.keys() <= set(order):
        raise PlanError(
            f"the order names {len(order)} blocks, which are not the {len(positions)} blocks to place; "
            "replay the order that place() returned for the same blocks"
        )
    return problem.placement(problem.first_fit([positions[key] for key in order], "replay"))


def lower_bound(blocks: Iterable[Block]) -> int:
    """No placement needs less: the most aligned bytes alive at one step, or the end of a fixed block.

    >>> lower_bound([Block(0, 1, 0, 1), Block(1, 65, 1, 2), Block(2, 64, 2, 3)])
    192
    """
    return _Problem(blocks).lower_bound


def check_placement(blocks: Iterable[Block], offsets: Mapping[int, int], total: int | None = None) -> None:
    """Prove that no two blocks alive together overlap, and alignment, fixed offsets and bounds.

    >>> check_placement([Block(3, 8, 0, 1), Block(4, 8, 1, 2)], {3: 0, 4: 64})
    >>> check_placement([Block(3, 100, 0, 1), Block(4, 8, 1, 2)], {3: 0, 4: 64})
    Traceback (most recent call last):
    rlx.errors.PlanError: blocks 3 and 4 overlap: bytes 0..100 and 64..72 are both alive at step 1; plan again
    """
    problem = _Problem(blocks)
    for block in problem.blocks:
        offset = offsets.get(block.key)
        if offset is None:
            raise PlanError(f"block {block.key} has no offset; plan again")
        if offset < 0 or offset % block.alignment:
            raise PlanError(f"block {block.key} at {offset} is not aligned to {block.alignment}; plan again")
        if block.offset is not None and offset != block.offset:
            raise PlanError(
                f"block {block.key} is fixed at {block.offset} but placed at {offset}; plan again"
            )
        if total is not None and offset + block.size > total:
            end = offset + block.size
            raise PlanError(f"block {block.key} ends at byte {end}, but there are {total}; plan again")
    for index, block in enumerate(problem.blocks):
        for neighbour in problem.neighbours[index]:
            if neighbour > index:
                _check_apart(block, problem.blocks[neighbour], offsets)


def _check_apart(a: Block, b: Block, offsets: Mapping[int, int]) -> None:
    a_start, b_start = offsets[a.key], offsets[b.key]
    a_end, b_end = a_start + a.size, b_start + b.size
    if max(a_start, b_start) < min(a_end, b_end):
        raise PlanError(
            f"blocks {a.key} and {b.key} overlap: bytes {a_start}..{a_end} and {b_start}..{b_end} "
            f"are both alive at step {max(a.first, b.first)}; plan again"
        )


@dataclass(slots=True)
class _Packing:
    """A placement by block index. `total` is too small to be true if `first_fit` gave up."""

    total: int
    offsets: list[int]
    order: list[int]
    heuristic: str


class _Problem:
    """The blocks of one placement and which of them are alive together (zero-sized ones never are)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = list(blocks)
        _validate(self.blocks)
        self.rooms = [block.room for block in self.blocks]
        self.movable = [index for index, block in enumerate(self.blocks) if block.offset is None]
        self.fixed = [block for block in self.blocks if block.offset is not None]
        # With one alignment for all, every free offset is aligned without a look.
        self.one_alignment = not self.fixed and len({block.alignment for block in self.blocks}) <= 1
        self.neighbours, self.lower_bound = self._alive_together()

    def _alive_together(self) -> tuple[list[list[int]], int]:
        """Sweep over time: the blocks that each block meets, and the lower bound."""
        blocks, rooms = self.blocks, self.rooms
        neighbours: list[list[int]] = [[] for _ in blocks]
        bound = max(
            (block.offset + block.room for block in self.fixed if block.offset is not None), default=0
        )
        alive: list[int] = []
        for index in sorted(range(len(blocks)), key=lambda index: blocks[index].first):
            if not rooms[index]:
                continue
            first = blocks[index].first
            alive = [other for other in alive if blocks[other].last >= first]
            neighbours[index].extend(alive)
            for other in alive:
                neighbours[other].append(index)
            alive.append(index)
            bound = max(bound, sum(map(rooms.__getitem__, alive)))
        return neighbours, bound

    def check_fixed(self) -> None:
        """Refuse fixed blocks that cannot both be where they are."""
        check_placement(self.fixed, {block.key: block.offset or 0 for block in self.fixed})

    def first_fit(self, order: list[int], heuristic: str) -> _Packing:
        """Every block of `order` at its lowest free offset, fixed blocks standing."""
        offsets = [-1 if block.offset is None else block.offset for block in self.blocks]
        ends = (block.offset + block.room for block in self.fixed if block.offset is not None)
        packing = _Packing(max(ends, default=0), offsets, order, heuristic)
        self.fill(packing, order)
        return packing

    def fill(self, packing: _Packing, todo: Sequence[int], give_up_above: int | None = None) -> int:
        """Place the blocks `todo` of `packing`, whose offsets are -1; stop when the total passes
        `give_up_above`. Returns how many neighbours were looked at."""
        rooms, neighbours, offsets, total = self.rooms, self.neighbours, packing.offsets, packing.total
        alignment = 1
        looks = 0
        for index in todo:
            room = rooms[index]
            if not self.one_alignment:
                alignment = self.blocks[index].alignment
            taken = [(offsets[other], rooms[other]) for other in neighbours[index] if offsets[other] >= 0]
            taken.sort()
            looks += len(taken) + 1
            lowest = 0
            for start, length in taken:
                if start - lowest >= room:
                    break
                if start + length > lowest:
                    lowest = -(-(start + length) // alignment) * alignment
            offsets[index] = lowest
            if lowest + room > total:
                total = lowest + room
                if give_up_above is not None and total > give_up_above:
                    break
        packing.total = total
        return looks

    def placement(self, packing: _Packing) -> Placement:
        keys = [block.key for block in self.blocks]
        return Placement(
            offsets=dict(zip(keys, packing.offsets, strict=True)),
            total=packing.total,
            lower_bound=self.lower_bound,
            heuristic=packing.heuristic,
            order=tuple(keys[index] for index in packing.order),
        )


class _Traits(NamedTuple):
    """What a block is ranked by."""

    room: int
    lifetime: int
    first: int
    pressure: int  # the most bytes alive at any step of its life
    key: int


# The orders that are tried: the smallest rank is placed first, hence lowest. Pressure counts because the
# fullest step decides the total. Every rank ends in the key, so that no two are equal.
_RANKINGS: Mapping[str, Callable[[_Traits], tuple[int, ...]]] = {
    "size": lambda t: (-t.room, t.first, t.key),
    "pressure, lifetime": lambda t: (-t.pressure, -t.lifetime, -t.room, t.key),
    "size x lifetime": lambda t: (-t.room * t.lifetime, t.first, t.key),
    "pressure, size": lambda t: (-t.pressure, -t.room, t.key),
    "lifetime": lambda t: (-t.lifetime, -t.room, t.key),
    "start": lambda t: (t.first, -t.room, t.key),
}


def _attempts(problem: _Problem, search_looks: int) -> Iterator[_Packing]:
    """Packings, computed lazily: one per heuristic, then the search from the best."""
    traits = [
        _Traits(room, _lifetime(block), block.first, pressure, block.key)
        for block, room, pressure in zip(problem.blocks, problem.rooms, _pressure(problem), strict=True)
    ]
    found: list[_Packing] = []
    for name, rank in _RANKINGS.items():
        ranks = list(map(rank, traits))
        found.append(problem.first_fit(sorted(problem.movable, key=ranks.__getitem__), name))
        yield found[-1]
    if problem.movable and not problem.fixed:
        found.append(_skyline(problem))
        yield found[-1]
    found.sort(key=lambda packing: packing.total)
    for start in found[:_SEARCH_STARTS]:
        yield _search(problem, start, search_looks // _SEARCH_STARTS)


def _lifetime(block: Block) -> int:
    return block.last - block.first + 1


def _pressure(problem: _Problem) -> list[int]:
    blocks, rooms = problem.blocks, problem.rooms
    steps = sorted({block.first for block in blocks})  # bytes alive only grow where a block starts
    change = [0] * (len(steps) + 1)
    spans = []
    for block, room in zip(blocks, rooms, strict=True):
        start, stop = bisect.bisect_left(steps, block.first), bisect.bisect_right(steps, block.last)
        spans.append((start, stop))
        change[start] += room
        change[stop] -= room
    alive = 0
    for position, delta in enumerate(change):
        alive += delta
        change[position] = alive
    return [max(change[start:stop]) for start, stop in spans]


def _skyline(problem: _Problem) -> _Packing:
    """Best fit: the lowest valley of the skyline over time takes the longest-lived block that fits between
    its walls; a valley that no block fits is filled up to its lower wall."""
    blocks, rooms = problem.blocks, problem.rooms
    waiting = sorted(problem.movable, key=lambda i: (blocks[i].first, i))
    firsts = [blocks[index].first for index in waiting]
    edges = [min(firsts), max(block.last for block in blocks) + 1]  # valley k spans edges[k] to edges[k + 1]
    heights = [0]
    offsets = [0] * len(blocks)
    while waiting:
        height = min(heights)
        valley = heights.index(height)
        left, right = edges[valley], edges[valley + 1]
        reach = range(bisect.bisect_left(firsts, left), bisect.bisect_left(firsts, right))
        fitting = [position for position in reach if blocks[waiting[position]].last < right]
        if fitting:
            longest = max(fitting, key=lambda p: (_lifetime(blocks[waiting[p]]), rooms[waiting[p]], -p))
            index = waiting.pop(longest)
            del firsts[longest]
            offsets[index] = height
            start, stop = blocks[index].first, blocks[index].last + 1
            cuts = [(left, height)] * (start > left) + [(start, height + rooms[index])]
            cuts += [(stop, height)] * (stop < right)
        else:
            walls = heights[max(0, valley - 1) : valley] + heights[valley + 1 : valley + 2]
            cuts = [(left, min(walls))]
        edges[valley : valley + 1] = [edge for edge, _ in cuts]
        heights[valley : valley + 1] = [top for _, top in cuts]
        for wall in range(min(valley + len(cuts), len(heights) - 1), max(0, valley - 1), -1):
            if heights[wall] == heights[wall - 1]:
                del heights[wall], edges[wall]
    order = sorted(problem.movable, key=lambda i: (offsets[i], blocks[i].first, blocks[i].key))
    return problem.first_fit(order, "best fit")


def _search(problem: _Problem, start: _Packing, looks: int) -> _Packing:
    """Hill climbing: a block that reaches the top, or one it meets, is placed earlier; the new order stays if
    it is not worse. A seeded `random()` gives the same numbers on every platform and Python version."""
    chance = random.Random(_SEARCH_SEED)
    rooms = problem.rooms
    current = replace(start, heuristic="search")
    while looks > 0 and current.total > problem.lower_bound:
        tops = [i for i in current.order if current.offsets[i] + rooms[i] == current.total]
        mover = tops[int(chance.random() * len(tops))]
        if chance.random() < 0.3:
            met = [other for other in problem.neighbours[mover] if problem.blocks[other].offset is None]
            mover = met[int(chance.random() * len(met))] if met else mover
        position = current.order.index(mover)
        target = int(chance.random() * position)
        order = current.order.copy()
        order.insert(target, order.pop(position))
        offsets = current.offsets.copy()
        for index in order[target:]:
            offsets[index] = -1
        placed = max((offsets[i] + rooms[i] for i in range(len(rooms)) if offsets[i] >= 0), default=0)
        trial = _Packing(placed, offsets, order, "search")
        looks -= problem.fill(trial, order[target:], give_up_above=current.total)
        if trial.total <= current.total:
            current = trial
    return current


def _validate(blocks: Sequence[Block]) -> None:
    seen = set()
    for block in blocks:
        if block.key in seen:
            raise PlanError(f"two blocks have the key {block.key}; give every block its own")
        seen.add(block.key)
        if block.size < 0 or block.last < block.first or block.alignment < 1:
            raise PlanError(
                f"block {block.key} has size {block.size}, steps {block.first}..{block.last} and alignment "
                f"{block.alignment}; sizes are not negative, steps ascend, alignments are positive"
            )
