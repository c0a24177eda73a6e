"""Layouts: where the elements of a tensor are stored, as data.

A layout cuts a tensor into boxes. In a box, each index is written in digits, and each digit has a stride: the
offset of an element is the sum of digits times strides. From this one description follow packing and
unpacking of arrays, the offset of an element and the element at an offset (as expressions of kernels), the
size, and the checks: every element has one place, and every offset is inside the storage.

The text of a layout is what graphs and plans show:

    3,10 -> 30: 0:3=3@4 0:8=2@12,4@1; 0:3=3@2 8:10=2@1 +24

A [3, 10] matrix is stored in 30 elements, in two boxes. Columns 0 to 7 are two panels, 12 elements apart, of
4 columns; rows are 4 elements apart. Columns 8 and 9 are stored from offset 24 on. An axis `2*3` counts as
two axes, of 2 and of 3. An axis `?` has any size and is kept as an axis of the storage. Digits may count
further than an axis reaches: that is padding, and holds zeros.

Several tensors may share a storage of bytes. The layout of each one names its elements, and counts in them:

    f16 2,32 -> 1152: 0:2=2@288 0:32=32@1

The [2, 32] scales of a [64, 32] matrix of 4 bits: 32 of them in front of the codes of each group. Such a
layout is one box, and leaves room for the others.

`rlx.kernel.panels` has the layouts that kernels read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import Any, TypeVar

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.attr import Described
from rlx.ir.dim import Dim
from rlx.kernel.boxes import (
    Box,
    Digit,
    Part,
    Side,
    apart,
    choose,
    closed_up,
    clusters,
    covers,
    cut_along,
    long_rows,
    offset_in,
    part_of,
    runs,
    tiles,
)
from rlx.kernel.packed import ELEMENTS, Element
from rlx.kernel.scalar import TRUE, Scalar, const, in_range, select
from rlx.records import dataclass

MOST = 64  # axes and boxes of a layout, digits of a box
_SLAB = 1 << 17  # elements in bytes that are converted at once
Factors = tuple[int, ...]
Index = TypeVar("Index", int, Scalar)


@dataclass(frozen=True)
class Layout(Described):
    """Where the elements of a tensor are stored; see the module's text.

    `shape` gives the factors of each axis (None: any size), `stored` the sizes of the storage (None for the
    axes of any size, in order). Digits count in the storage without those axes, in row-major order. `packed`
    says how one is written if the storage is bytes; elsewhere storage and tensor have one dtype.

    >>> layout = Layout.parse("3,10 -> 30: 0:3=3@4 0:8=2@12,4@1; 0:3=3@2 8:10=2@1 +24")
    >>> layout.elements, layout.sizes, layout.offset((1, 9))
    (30, (3, 10), 27)
    """

    shape: tuple[Factors | None, ...]
    stored: tuple[int | None, ...]
    boxes: tuple[Box, ...]
    packed: Element | None = None

    def __post_init__(self) -> None:
        why = self._why_wrong()
        if why is not None:
            raise ShapeError(f"layout {self.text[:200]}: {why}")

    # ---- text

    @cached_property
    def text(self) -> str:
        """The layout as graphs and plans show it."""
        axes = ",".join("?" if f is None else "*".join(map(str, f)) for f in self.shape)
        stored = ",".join("?" if d is None else str(d) for d in self.stored)
        text = f"{axes} -> {stored}: {'; '.join(map(_box_text, self.boxes))}".rstrip()
        return text if self.packed is None else f"{self.packed.name} {text}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Layout({self.text!r})"

    def __hash__(self) -> int:
        return hash(self.text)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that a text describes.

        >>> Layout.parse("?,5 -> ?,2,4: 0:5=2@4,4@1").sizes
        (None, 5)
        """
        return _parse(text)

    # ---- sizes

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes that boxes have: all factors."""
        return tuple(n for factors in self.shape for n in factors or ())

    @cached_property
    def sizes(self) -> tuple[int | None, ...]:
        """Sizes of the tensor."""
        return tuple(None if f is None else prod(f) for f in self.shape)

    @cached_property
    def known(self) -> tuple[int, ...]:
        """Sizes of the storage, without axes of any size."""
        return tuple(d for d in self.stored if d is not None)

    @cached_property
    def elements(self) -> int:
        """Elements of the storage (or places, if each has several), for one index of all axes of any size."""
        return prod(self.known) if self.packed is None else prod(self.known) * 8 // self.packed.place_bits

    @cached_property
    def is_whole(self) -> bool:
        """Whether there is no padding."""
        return prod(self.axes) == self.elements

    def stored_shape(self, shape: Sequence[Dim]) -> tuple[Dim, ...] | None:
        """Shape of the storage of a tensor, None where it does not fit; axes in front are kept.

        >>> Layout.parse("2,3 -> 8: 0:2=2@4 0:3=4@1").stored_shape((7, 2, 3))
        (7, 8)
        """
        return _replaced(shape, self.sizes, self.stored)

    def read_shape(self, stored: Sequence[Dim]) -> tuple[Dim, ...] | None:
        """Shape of the tensor that is stored so, None where the storage does not fit."""
        return _replaced(stored, self.stored, self.sizes)

    # ---- checks

    def _why_wrong(self) -> str | None:
        if len([d for d in self.stored if d is None]) != self.shape.count(None):
            return "axes of any size must be axes of the storage"
        if min((*self.axes, *self.known), default=0) < 0 or () in self.shape:
            return "sizes are at least 0"
        if max(len(self.shape), len(self.stored), len(self.axes), len(self.boxes)) > MOST:
            return f"there are more than {MOST} axes or boxes"
        if self.packed is not None and (len(self.stored) != 1 or len(self.shape) < 2):
            return "bytes are stored along one axis, their elements have more"  # kernels tell them by rank
        if self.packed is not None and 8 * self.known[0] % self.packed.place_bits:
            return f"{self.known[0]} bytes are not whole elements {self.packed.name}"
        for box in self.boxes:
            if sum([len(side.digits) for side in box.sides]) > MOST:
                return f"a box has more than {MOST} digits"
            if len(box.sides) != len(self.axes):
                return f"a box has {len(box.sides)} axes, not {len(self.axes)}"
            for side in box.sides:
                if not 0 <= side.start < side.stop or side.extent < side.length:
                    return f"digits do not count from {side.start} to {side.stop}"
                if any(d.extent < 2 or d.stride < 1 for d in side.digits):
                    return "a digit counts at least to 2, in steps of at least 1"
        if not covers(self.boxes, self.axes):
            return "boxes do not hold every element once"
        if not self.boxes:
            return None if self.elements == 0 else "nothing is stored"
        if self.packed is not None:
            if len(self.boxes) > 1:
                return "elements in bytes are one box"
            element, box = self.packed, self.boxes[0]
            if not apart(box, self.elements, element.places):
                return "elements overlap, or are outside the storage"
            _, run, far = closed_up(box, element.places)
            whole = all(n * element.place_bits % 8 == 0 for n in (box.base, *[d.stride for d in far]))
            whole = whole and run % element.together == 0
            return None if whole else "elements side by side are not whole bytes"
        if min(box.base for box in self.boxes) or not tiles([part_of(b) for b in self.boxes], self.elements):
            return "boxes do not fill the storage"
        return None

    # ---- expressions

    def offset(self, index: Sequence[Index]) -> Index:
        """Where an element is stored: `index` has numbers or expressions, for each axis of known size.

        >>> Layout.parse("2,3 -> 8: 0:2=2@4 0:3=4@1").offset((1, 2))
        6
        """
        return self._offset(self.boxes, self._factored(index), 0)

    def _factored(self, index: Sequence[Index]) -> list[Index]:
        """The index of each factor."""
        out: list[Index] = []
        for at, factors in zip(index, [f for f in self.shape if f is not None], strict=True):
            worth = prod(factors)
            for i, n in enumerate(factors):
                inside = at % worth if i else at
                worth //= max(n, 1)
                out.append(inside // worth if i < len(factors) - 1 else inside)
        return out

    def _offset(self, boxes: Sequence[Box], index: Sequence[Index], axis: int) -> Index:
        if len(boxes) == 1:
            found: Index = offset_in(boxes[0], index)
            return found
        starts = sorted({box.sides[axis].start for box in boxes})
        if len(starts) == 1:
            return self._offset(boxes, index, axis + 1)
        low = [box for box in boxes if box.sides[axis].start < starts[1]]
        high = [box for box in boxes if box.sides[axis].start >= starts[1]]
        chosen: Index = choose(
            index[axis] < starts[1],
            lambda: self._offset(low, index, axis),
            lambda: self._offset(high, index, axis),
        )
        return chosen

    def element(self, at: Scalar, read: Callable[[list[Scalar], Scalar], Scalar]) -> Scalar:
        """What is stored at an offset. `read` gives an element (by its index along each axis of known size)
        where a condition holds, and what padding holds elsewhere."""
        if not self.boxes:
            return read([const(0)] * len([f for f in self.shape if f is not None]), const(False, TRUE.dtype))
        return self._element([part_of(b) for b in self.boxes], at, [[] for _ in self.axes], set(), read)

    def _element(
        self,
        parts: Sequence[Part],
        at: Scalar,
        found: list[list[tuple[int, Scalar]]],
        unbounded: set[int],
        read: Callable[[list[Scalar], Scalar], Scalar],
    ) -> Scalar:
        """`unbounded` are axes whose index may be outside of the box, which is then not the chosen one."""
        first, *later = clusters(parts)
        if later:
            cut = later[0][0].base
            low = self._element(first, at, found, unbounded | _first_axes(first), read)
            high = [part.moved(-cut) for group in later for part in group]
            more_unbounded = unbounded | _first_axes(high)
            return select(at < cut, low, self._element(high, at - cut, found, more_unbounded, read))
        if not first[0].places:
            return self._read(first[0].box, found, unbounded, read)
        place, *_ = first[0].places
        more = [[*had] for had in found]
        more[place.axis].append((place.worth, at // place.digit.stride))
        inner = [part.inner() for part in first]
        return self._element(inner, at % place.digit.stride, more, unbounded, read)

    def _read(
        self,
        box: Box,
        found: Sequence[Sequence[tuple[int, Scalar]]],
        unbounded: set[int],
        read: Callable[[list[Scalar], Scalar], Scalar],
    ) -> Scalar:
        exists, index = TRUE, []
        for axis, (side, digits) in enumerate(zip(box.sides, found, strict=True)):
            at: Scalar = const(0)
            for worth, digit in sorted(digits, key=lambda d: -d[0]):
                at = at + digit * worth
            at = at + side.start
            if side.extent > side.length or axis in unbounded:
                exists = exists & in_range(at, side.stop)
            index.append(at)
        merged, rest = [], iter(index)
        for factors in self.shape:
            if factors is not None:
                at = const(0)
                for n in factors:
                    at = at * n + next(rest)
                merged.append(at)
        return read(merged, exists)

    # ---- arrays

    def pack(self, x: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        """An array as it is stored; axes in front are a batch. `into` is a storage of bytes with the tensors
        that share it.

        >>> Layout.parse("2,3 -> 8: 0:2=2@4 0:3=4@1").pack(np.arange(6).reshape(2, 3)).tolist()
        [0, 1, 2, 0, 3, 4, 5, 0]
        """
        given, lead = self._given(x)
        if self.packed is not None:
            shape = (*lead, *self.known)
            stored = np.zeros(shape, np.uint8) if into is None else np.array(into, np.uint8, order="C")
            self._pack_bytes(self.packed, given, stored)
            return stored
        flat = (np.empty if self.is_whole else np.zeros)((*lead, self.elements), x.dtype)
        self._pack_elements(given, flat)
        return _known_back(flat.reshape(*lead, *self.known), self.stored)

    def pack_in(self, place: np.ndarray, x: np.ndarray) -> None:
        """Store an array in `place`, which has the shape and dtype of the storage and holds zeros, or the
        other tensors of a storage of bytes.

        >>> place = np.zeros(8, np.int64)
        >>> Layout.parse("2,3 -> 8: 0:2=2@4 0:3=4@1").pack_in(place, np.arange(6).reshape(2, 3))
        >>> place.tolist()
        [0, 1, 2, 0, 3, 4, 5, 0]
        """
        given, lead = self._given(x)
        if self.packed is not None:
            self._pack_bytes(self.packed, given, place)
        elif None in self.stored:  # axes of any size are moved
            place[...] = self.pack(x)
        else:
            self._pack_elements(given, place.reshape(*lead, self.elements))

    def slab_step(self, axis: int) -> int | None:
        """Of what slabs along an axis must be multiples for `pack_slab`; None where it takes none.

        >>> layout = Layout.parse("3,10 -> 30: 0:3=3@4 0:8=2@12,4@1; 0:3=3@2 8:10=2@1 +24")
        >>> layout.slab_step(0), layout.slab_step(1)
        (1, 4)
        """
        if None in self.shape or any(len(f or ()) != 1 for f in self.shape):
            return None
        together = 1 if self.packed is None else self.packed.together
        sides = [box.sides[axis] for box in (self.boxes if together == 1 else self._closed.boxes)]
        if any(side.digits and side.digits[0].stride % together for side in sides):
            return None
        step = lcm(*[side.worths()[0] for side in sides if side.digits])
        return step if all(side.start % step == 0 for side in sides) else None

    def pack_slab(self, place: np.ndarray, x: np.ndarray, axis: int, first: int) -> None:
        """Store a part of an array, elements from `first` on along an axis, in the place of the whole one.

        >>> place = np.zeros(8, np.int64)
        >>> Layout.parse("2,3 -> 8: 0:2=2@4 0:3=4@1").pack_slab(place, np.array([[4, 5, 6]]), 0, 1)
        >>> place.tolist()
        [0, 0, 0, 0, 4, 5, 6, 0]
        """
        if self.packed is not None:
            self._cut(axis, first, first + x.shape[axis])._pack_bytes(self.packed, x, place)
            return
        boxes = [cut_along(box, axis, first, first + x.shape[axis]) for box in self.boxes]
        self._pack_elements(x, place.reshape(self.elements), [box for box in boxes if box is not None])

    def _given(self, x: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """An array in the shape of all factors, its batch in front, and the sizes of that."""
        if self.stored_shape(x.shape) is None:
            raise ShapeError(f"an array of shape {x.shape} has not the layout {self}")
        return _known_last(x, self.sizes, self.axes)

    def _pack_elements(self, given: np.ndarray, flat: np.ndarray, boxes: Sequence[Box] | None = None) -> None:
        for there, here in self._bricks(flat, given, boxes):
            there[...] = here

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The array that is stored so.

        >>> layout = Layout.parse("?,5,? -> ?,2,?,4: 0:5=2@4,4@1")
        >>> image = np.arange(30).reshape(1, 5, 6)
        >>> layout.pack(image).shape, np.array_equal(layout.unpack(layout.pack(image)), image)
        ((1, 2, 6, 4), True)
        """
        if self.read_shape(packed.shape) is None:
            raise ShapeError(f"an array of shape {packed.shape} has not the layout {self}")
        if self.packed is not None:
            return self._unpack_bytes(self.packed, packed)
        given, lead = _known_last(packed, self.stored, (self.elements,))
        out = np.empty((*lead, *self.axes), packed.dtype)
        for there, here in self._bricks(np.ascontiguousarray(given), out):
            here[...] = there
        return _known_back(out.reshape(*lead, *[n for n in self.sizes if n is not None]), self.sizes)

    @cached_property
    def _closed(self) -> Layout:
        """Elements in bytes as they would be stored without gaps and in their own dtype."""
        assert self.packed is not None
        boxes = tuple([closed_up(box, self.packed.places)[0] for box in self.boxes])
        elements = prod([side.extent for box in boxes for side in box.sides]) if boxes else 0
        return Layout(self.shape, (elements,), boxes)

    def _runs(self, stored: np.ndarray) -> np.ndarray:
        """A view on bytes [..., n]: those of the elements, in the order without gaps."""
        assert self.packed is not None
        if not self.boxes:
            return stored
        bits, (_, run, far) = self.packed.place_bits, closed_up(self.boxes[0], self.packed.places)
        return np.lib.stride_tricks.as_strided(
            stored[..., self.boxes[0].base * bits // 8 :],
            (*stored.shape[:-1], *[d.extent for d in far], run * self.packed.bits // 8),
            (*stored.strides[:-1], *[d.stride * bits // 8 for d in far], 1),
        )

    def _pack_bytes(self, element: Element, given: np.ndarray, stored: np.ndarray) -> None:
        """Slab by slab: all elements in whole bytes would take several times the storage."""
        for slab, axis, first in self._slabs:
            at = axis - len(self.axes)
            part = np.moveaxis(np.moveaxis(given, at, 0)[first : first + slab.axes[axis]], 0, at)
            packed = element.to_bytes(element.to_units(slab._closed.pack(part)))
            there = slab._runs(stored)
            there[...] = packed.reshape(there.shape)

    @cached_property
    def _slabs(self) -> list[tuple[Layout, int, int]]:
        """Layouts of parts of a tensor in bytes, which has one box; the axis that is cut, and where. A slab
        holds a few of what the digit with the largest stride counts: of panels, say."""
        whole = Layout(tuple([(n,) for n in self.axes]), self.stored, self.boxes, self.packed)
        places = part_of(self.boxes[0]).places if self.boxes else ()
        box = self.boxes[0] if places else None
        if box is None or whole.elements <= _SLAB or box.sides[places[0].axis].digits[0] != places[0].digit:
            return [(whole, 0, 0)]
        axis, worth, length = places[0].axis, places[0].worth, box.sides[places[0].axis].length
        step = max(1, _SLAB * places[0].digit.extent // whole.elements) * worth
        starts = range(0, length, step)
        return [(whole._cut(axis, start, min(length, start + step)), axis, start) for start in starts]

    def _cut(self, axis: int, first: int, stop: int) -> Layout:
        """Where a tensor in bytes has its elements first..stop of an axis, which are counted from 0 then."""
        box = cut_along(self.boxes[0], axis, first, stop)
        sizes = tuple([(n,) for n in (*self.axes[:axis], stop - first, *self.axes[axis + 1 :])])
        return Layout(sizes, self.stored, () if box is None else (box,), self.packed)

    def _unpack_bytes(self, element: Element, stored: np.ndarray) -> np.ndarray:
        runs = np.ascontiguousarray(self._runs(np.ascontiguousarray(stored)))
        packed = runs.reshape(*stored.shape[:-1], -1)
        return self._closed.unpack(element.from_units(element.from_bytes(packed)))

    def _bricks(
        self, flat: np.ndarray, x: np.ndarray, boxes: Sequence[Box] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs of views on storage [..., elements] and on an array [..., axes], of the same elements."""
        lead, step = flat.shape[:-1], flat.itemsize
        for box in self.boxes if boxes is None else boxes:
            for chosen in itertools.product(*[runs(s.length, s.digits) for s in box.sides]):
                at, shape, strides = box.base, [], []
                cut: list[Any] = [...]
                for side, (first, stop, digits, distance) in zip(box.sides, chosen, strict=True):
                    at += distance
                    cut.append(slice(side.start + first, side.start + stop))
                    shape += [d.extent for d in digits]
                    strides += [d.stride * step for d in digits]
                there = np.lib.stride_tricks.as_strided(
                    flat[..., at:], (*lead, *shape), (*flat.strides[:-1], *strides)
                )
                here = x[tuple(cut)].reshape(*lead, *shape)
                yield from long_rows(there, here, strides)


# ---- text


def _box_text(box: Box) -> str:
    sides = []
    for side in box.sides:
        digits = ",".join(f"{d.extent}@{d.stride}" for d in side.digits)
        sides.append(f"{side.start}:{side.stop}" + (f"={digits}" if digits else ""))
    return " ".join(sides) + (f" +{box.base}" if box.base else "")


_NUMBER = r"(?:0|[1-9]\d{0,18})"
_AXIS = rf"(?:\?|{_NUMBER}(?:\*{_NUMBER})*)"
_SIDE = re.compile(rf"({_NUMBER}):({_NUMBER})(?:=({_NUMBER}@{_NUMBER}(?:,{_NUMBER}@{_NUMBER})*))?")
_BASE = re.compile(rf"\+({_NUMBER})")
_ELEMENT = "|".join(map(re.escape, ELEMENTS))
_SIZES = rf"((?:\?|{_NUMBER})(?:,(?:\?|{_NUMBER}))*)"
_LAYOUT = re.compile(rf"(?:({_ELEMENT}) )?({_AXIS}(?:,{_AXIS})*) -> {_SIZES}:(.*)")


@lru_cache(1024)
def _parse(text: str) -> Layout:
    found = _LAYOUT.fullmatch(text)
    if found is None:
        raise ShapeError(f"{text!r} is not a layout such as '2,3 -> 8: 0:2=2@4 0:3=4@1'")
    shape = [None if axis == "?" else tuple(map(int, axis.split("*"))) for axis in found[2].split(",")]
    stored = [None if size == "?" else int(size) for size in found[3].split(",")]
    boxes = [_parse_box(box) for box in found[4].split(";")] if found[4].strip() else []
    return Layout(tuple(shape), tuple(stored), tuple(boxes), ELEMENTS.get(found[1]))


def _parse_box(text: str) -> Box:
    words = text.split()
    base = _BASE.fullmatch(words[-1]) if words else None
    sides = []
    for word in words[:-1] if base else words:
        found = _SIDE.fullmatch(word)
        if found is None:
            raise ShapeError(f"{word!r} is not the side of a box such as '0:8=2@12,4@1'")
        pairs = [pair.split("@") for pair in found[3].split(",")] if found[3] else []
        digits = tuple(Digit(int(extent), int(stride)) for extent, stride in pairs)
        sides.append(Side(int(found[1]), int(found[2]), digits))
    return Box(tuple(sides), int(base[1]) if base else 0)


def layout(value: Any) -> Layout:
    """The kind of an attribute that is a layout, or the text of one.

    >>> layout("2,3 -> 6: 0:2=2@3 0:3=3@1").elements
    6
    """
    if isinstance(value, Layout):
        return value
    if not isinstance(value, str):
        raise ValueError(f"needs a layout, got {value!r}")
    return _parse(value)


def _first_axes(parts: Sequence[Part]) -> set[int]:
    """The axes of the digits with the largest strides."""
    return {part.places[0].axis for part in parts if part.places}


# ---- shapes


def _replaced(
    shape: Sequence[Dim], before: Sequence[int | None], after: Sequence[int | None]
) -> tuple[Dim, ...] | None:
    """A shape whose last axes `before` become `after`; sizes that are None are kept, in order."""
    first = len(shape) - len(before)
    if first < 0:
        return None
    own = shape[first:]
    if any(n is not None and d != n for d, n in zip(own, before, strict=True)):
        return None
    kept = iter([d for d, n in zip(own, before, strict=True) if n is None])
    return (*shape[:first], *[next(kept) if n is None else n for n in after])


def _known_last(
    x: np.ndarray, sizes: Sequence[int | None], to: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """An array with its axes of known size last, in shape `to`, and its other sizes."""
    first = x.ndim - len(sizes)
    known = [first + i for i, n in enumerate(sizes) if n is not None]
    kept = [i for i in range(x.ndim) if i not in known]
    lead = tuple(x.shape[i] for i in kept)
    return x.transpose(*kept, *known).reshape(*lead, *to), lead


def _known_back(x: np.ndarray, sizes: Sequence[int | None]) -> np.ndarray:
    """An array with axes of known size last, back in the order of `sizes`."""
    lead = x.ndim - len(sizes)
    kept, known = iter(range(lead, x.ndim)), iter(range(x.ndim - len(sizes) + sizes.count(None), x.ndim))
    order = [next(kept) if n is None else next(known) for n in sizes]
    return np.ascontiguousarray(x.transpose(*range(lead), *order))
