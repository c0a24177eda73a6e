"""Boxes of a tensor, and the digits that say where their elements are stored: the parts of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from rlx.kernel.scalar import Scalar, const, select
from rlx.records import dataclass

_INNER = 8  # digits up to this extent are copied one by one, so that NumPy's inner loops are long


@dataclass(frozen=True)
class Digit:
    """One digit of an index: how far it counts, and how far apart its steps are stored."""

    extent: int
    stride: int


@dataclass(frozen=True)
class Side:
    """One axis of a box: elements start..stop, counted by digits from the most significant one on."""

    start: int
    stop: int
    digits: tuple[Digit, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def extent(self) -> int:
        """How far the digits count."""
        return prod([d.extent for d in self.digits])

    def worths(self) -> list[int]:
        """What one step of each digit is worth."""
        return [prod([e.extent for e in self.digits[i + 1 :]]) for i in range(len(self.digits))]


@dataclass(frozen=True)
class Box:
    """A part of a tensor, and where it is stored."""

    sides: tuple[Side, ...]
    base: int


@dataclass(frozen=True)
class Place:
    """A digit of a box among all digits: the axis that it counts, and what a step is worth there."""

    digit: Digit
    axis: int
    worth: int


@dataclass(frozen=True)
class Part:
    """What is left to find of a box: its digits from the largest stride on, and where they begin."""

    box: Box
    base: int
    places: tuple[Place, ...]

    @property
    def end(self) -> int:
        """The offset after the last element."""
        return self.base + sum([(p.digit.extent - 1) * p.digit.stride for p in self.places]) + 1

    def moved(self, by: int) -> Part:
        """The same at other offsets."""
        return Part(self.box, self.base + by, self.places)

    def inner(self) -> Part:
        """Without the first digit."""
        return Part(self.box, self.base, self.places[1:])


def cut_along(box: Box, axis: int, first: int, stop: int) -> Box | None:
    """What a box has of the elements first..stop of an axis, which are counted from 0 then; None: nothing. It
    begins with a whole step of the first digit, and has no padding behind its last one."""
    side = box.sides[axis]
    low, high = max(side.start, first), min(side.stop, stop)
    if low >= high:
        return None
    base, digits = box.base, side.digits
    if digits:
        worth = side.worths()[0]
        ahead, rest = divmod(low - side.start, worth)
        assert rest == 0, "a digit would be cut"
        base += ahead * digits[0].stride
        count = -(-(high - low) // worth)
        digits = (*([Digit(count, digits[0].stride)] if count > 1 else []), *digits[1:])
    own = Side(low - first, high - first, digits)
    return Box((*box.sides[:axis], own, *box.sides[axis + 1 :]), base)


# ---- places in the storage


def part_of(box: Box) -> Part:
    places = [
        Place(digit, axis, worth)
        for axis, side in enumerate(box.sides)
        for digit, worth in zip(side.digits, side.worths(), strict=True)
    ]
    return Part(box, box.base, tuple(sorted(places, key=lambda p: -p.digit.stride)))


def clusters(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts in order, those together whose ranges overlap."""
    out: list[list[Part]] = []
    end = -1
    for part in sorted(parts, key=lambda p: p.base):
        if part.base >= end:
            out.append([])
        out[-1].append(part)
        end = max(end, part.end)
    return out


def tiles(parts: Sequence[Part], size: int) -> bool:
    """Whether parts fill a storage of this size, each element of it once."""
    done = 0
    for cluster in clusters(parts):
        places = cluster[0].places
        if cluster[0].base != done or any(p.places[:1] != places[:1] for p in cluster):
            return False
        if not places:
            if len(cluster) > 1:
                return False
            done += 1
            continue
        top = places[0].digit
        if not tiles([p.moved(-done).inner() for p in cluster], top.stride):
            return False
        done += top.extent * top.stride
    return done == size


def apart(box: Box, size: int, width: int = 1) -> bool:
    """Whether each element of a box has places of its own, as many as its width, inside a storage of this
    size."""
    span = width
    for place in reversed(part_of(box).places):
        if place.digit.stride < span:
            return False
        span += (place.digit.extent - 1) * place.digit.stride
    return box.base + span <= size


def closed_up(box: Box, width: int = 1) -> tuple[Box, int, list[Digit]]:
    """The same box without gaps, of elements that have one place each, not so many as their width; how many
    of them are side by side in the storage, and the digits that say where such runs are, from the largest
    stride on."""
    span, run, strides = width, 1, {}
    far: list[Digit] = []
    for place in reversed(part_of(box).places):
        if far or place.digit.stride != span:
            far.insert(0, place.digit)
        else:
            run *= place.digit.extent
        strides[place.digit.stride] = span // width
        span *= place.digit.extent
    sides = [
        Side(s.start, s.stop, tuple([Digit(d.extent, strides[d.stride]) for d in s.digits]))
        for s in box.sides
    ]
    return Box(tuple(sides), 0), run, far


def covers(boxes: Sequence[Box], axes: Sequence[int], axis: int = 0) -> bool:
    """Whether boxes hold each element of a tensor once."""
    if axis == len(axes) or not boxes:
        return len(boxes) == 1 or (not boxes and 0 in axes)
    end = 0
    for start in sorted({box.sides[axis].start for box in boxes}):
        some = [box for box in boxes if box.sides[axis].start == start]
        if start != end or len({box.sides[axis].stop for box in some}) > 1:
            return False
        if not covers(some, axes, axis + 1):
            return False
        end = some[0].sides[axis].stop
    return end == axes[axis]


def offset_in(box: Box, index: Sequence[Any]) -> Any:
    """The offset of an element of a box."""
    terms = []
    for side, at in zip(box.sides, index, strict=True):
        inside = at - side.start
        for i, (digit, worth) in enumerate(zip(side.digits, side.worths(), strict=True)):
            counted = inside // worth
            terms.append((digit.stride, (counted % digit.extent if i else counted) * digit.stride))
    total = None
    for _, term in sorted(terms, key=lambda t: -t[0]):
        total = term if total is None else total + term
    if total is None:
        return const(box.base) if any(isinstance(at, Scalar) for at in index) else box.base
    return total + box.base


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if isinstance(condition, Scalar):
        return select(condition, yes(), no())
    return yes() if condition else no()


# ---- runs of elements


def runs(length: int, digits: tuple[Digit, ...]) -> list[tuple[int, int, tuple[Digit, ...], int]]:
    """The first `length` numbers in digits, as runs of which every digit counts from 0: first, stop, digits,
    and offset."""
    if not digits:
        return [(0, 1, (), 0)] if length else []
    top, worth = digits[0], prod([d.extent for d in digits[1:]])
    full, rest = divmod(length, worth)
    out = [(0, full * worth, (Digit(full, top.stride), *digits[1:]), 0)] if full else []
    for first, stop, more, offset in runs(rest, digits[1:]):
        out.append((full * worth + first, full * worth + stop, more, full * top.stride + offset))
    return out


def long_rows(
    there: np.ndarray, here: np.ndarray, strides: Sequence[int], most: int = _INNER
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays, or (where neighbours in the storage are few) each slice of them along that axis.

    `strides` are those of the last axes of the storage; at most `most` slices are made.
    """
    if strides:
        number = min(range(len(strides)), key=lambda i: strides[i])
        axis = there.ndim - len(strides) + number
        if there.shape[axis] <= most < there.size:
            rest = [*strides[:number], *strides[number + 1 :]]
            for i in range(there.shape[axis]):
                at: tuple[Any, ...] = (*(slice(None),) * axis, i)
                yield from long_rows(there[at], here[at], rest, most // there.shape[axis])
            return
    yield there, here
