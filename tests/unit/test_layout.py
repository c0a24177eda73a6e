"""Layouts: one description gives packing, offsets, their inverse and text, and what is wrong is refused."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from rlx.errors import RlxError
from rlx.kernel.layout import Layout, layout
from rlx.kernel.panels import ChannelBlocks, KernelPanels, Panels, blocks_of, groups_of
from rlx.kernel.scalar import PRIMITIVES, Scalar, axes, const, select

RNG = random.Random(20)


def evaluate(s: Scalar, index: tuple[int, ...]) -> int:
    """The value of an index expression at a point."""
    if s.prim == "const":
        return int(s.data)
    if s.prim == "axis":
        return index[s.data]
    return int(PRIMITIVES[s.prim].ref(*(np.asarray(evaluate(a, index)) for a in s.args)))


def panels_by_hand(p: Panels, w: np.ndarray) -> np.ndarray:
    """Panels as their description says, element by element."""
    parts = []
    for first in range(0, p.n, p.columns):
        width = p.columns if first + p.columns <= p.n else -(-(p.n - first) // p.lanes) * p.lanes
        panel = np.zeros((-(-p.k // p.group), width, p.group), w.dtype)
        for k, n in product(range(p.k), range(first, min(first + width, p.n))):
            panel[k // p.group, n - first, k % p.group] = w[k, n]
        parts.append(panel.reshape(-1))
    return np.concatenate([np.zeros(0, w.dtype), *parts])


def kernel_by_hand(k: KernelPanels, w: np.ndarray) -> np.ndarray:
    """For each group the panels of a matrix whose rows are blocks of channels, window, channels."""
    per, parts = k.shape[0] // k.groups, []
    for group in range(k.groups):
        own = w[group * per : (group + 1) * per].reshape(per, k.shape[1], -1)
        rows = []
        for low in range(0, k.shape[1], k.block):
            channels = range(low, min(low + k.block, k.shape[1]))
            for tap in range(own.shape[2]):
                rows += [own[:, c, tap] for c in channels]
                rows += [np.zeros(per, w.dtype)] * (-len(channels) % k.group)
        matrix = np.array(rows, w.dtype).reshape(-1, per)
        parts.append(panels_by_hand(Panels(len(matrix), per, k.columns, k.lanes, k.group), matrix))
    return np.concatenate(parts)


def blocks_by_hand(b: ChannelBlocks, x: np.ndarray) -> np.ndarray:
    out = np.zeros((x.shape[0], -(-b.channels // b.lanes), *x.shape[2:], b.lanes), x.dtype)
    for c in range(b.channels):
        out[:, c // b.lanes, ..., c % b.lanes] = x[:, c]
    return out


def units() -> tuple[int, int, int]:
    lanes = RNG.choice([1, 2, 4, 8])
    return lanes * RNG.choice([1, 2, 3]), lanes, RNG.choice([1, 2, 4])


def check(own: Layout, x: np.ndarray, want: np.ndarray) -> None:
    """Packing, unpacking, offsets and their inverse all agree with what was packed by hand."""
    assert Layout.parse(str(own)) == own and hash(Layout.parse(str(own))) == hash(own)
    packed = own.pack(x)
    np.testing.assert_array_equal(packed, want)
    np.testing.assert_array_equal(own.unpack(packed), x)
    if x.ndim != len(own.sizes) or x.size > 150 or None in own.sizes:
        return
    index = axes(x.ndim)
    offset = own.offset(index) if own.boxes else None
    for point in np.ndindex(*x.shape):
        at = own.offset(point)
        assert packed[at] == x[point] and offset is not None and evaluate(offset, point) == at

    def read(found: list[Scalar], exists: Scalar) -> Scalar:
        flat: Scalar = const(0)
        for i, n in zip(found, x.shape, strict=True):
            flat = flat * n + i
        return select(exists, flat + 1, const(0))

    element = own.element(axes(1)[0], read)
    numbers = own.pack(np.arange(1, x.size + 1).reshape(x.shape))
    assert [evaluate(element, (at,)) for at in range(own.elements)] == numbers.tolist()


@pytest.mark.parametrize("_", range(60))
def test_panels(_: int) -> None:
    p = Panels(RNG.randrange(0, 12), RNG.randrange(0, 50), *units())
    x = np.arange(1, p.k * p.n + 1).reshape(p.k, p.n)
    assert p.layout.elements == p.elements
    check(p.layout, x, panels_by_hand(p, x))


@pytest.mark.parametrize("_", range(60))
def test_kernels(_: int) -> None:
    (columns, lanes, group), groups = units(), RNG.choice([1, 1, 2, 3])
    window = [RNG.randrange(1, 4) for _ in range(RNG.randrange(0, 4))]
    shape = (groups * RNG.randrange(1, 9), RNG.randrange(1, 10), *window)
    k = KernelPanels(shape, groups, columns, lanes, group * RNG.choice([1, 2, 4]), group)
    x = np.arange(1, np.prod(shape) + 1).reshape(shape)
    assert groups_of(k.layout) == groups
    check(k.layout, x, kernel_by_hand(k, x))


@pytest.mark.parametrize("_", range(30))
def test_blocks(_: int) -> None:
    rank = RNG.randrange(2, 6)
    b = ChannelBlocks(rank, RNG.randrange(1, 20), RNG.choice([1, 2, 4, 8]))
    sizes = [RNG.randrange(0, 4) for _ in range(rank)]
    sizes[1] = b.channels
    x = np.arange(1, np.prod(sizes) + 1).reshape(sizes)
    assert blocks_of(b.layout) == b
    check(b.layout, x, blocks_by_hand(b, x))


def test_a_batch_is_kept() -> None:
    p = Panels(3, 10, 4, 2, 2)
    x = np.arange(180).reshape(2, 3, 3, 10)
    packed = p.layout.pack(x)
    assert packed.shape == (2, 3, p.elements)
    np.testing.assert_array_equal(packed[1, 2], p.layout.pack(x[1, 2]))
    np.testing.assert_array_equal(p.layout.unpack(packed), x)


def test_transposed_arrays_are_packed_alike() -> None:
    x = np.arange(60, dtype=np.float32).reshape(10, 6).T
    own = Panels(6, 10, 4, 2).layout
    np.testing.assert_array_equal(own.pack(x), own.pack(x.copy()))


WRONG = {
    "": "is not a layout",
    "2,3": "is not a layout",
    "2,3 -> 6: 0:2=2@3 0:3=3@-1": "is not the side of a box",
    "2,3 -> 6: 0:2=2@3 0:3=3": "is not the side of a box",
    "2,3 -> 6: 0:2=2@3": "a box has 1 axes, not 2",
    "2,3 -> 6: 0:2=2@3 0:3=2@1": "digits do not count from 0 to 3",
    "2,3 -> 6: 0:2=2@3 3:3=3@1": "digits do not count from 3 to 3",
    "2,3 -> 6: 0:2=2@3 0:3=3@1,1@1": "a digit counts at least to 2",
    "2,3 -> 6: 0:2=2@3 0:3=3@0": "a digit counts at least to 2, in steps of at least 1",
    "2,3 -> 6: 0:2=2@3 0:2=2@1": "boxes do not hold every element once",
    "2,3 -> 6: 0:2=2@3 0:4=4@1": "boxes do not hold every element once",
    "2,3 -> 9: 0:2=2@3 0:3=3@1; 0:2=2@3 0:3=3@1 +6": "boxes do not hold every element once",
    "2,3 -> 6: 0:2=2@3 0:3=3@1 +1": "boxes do not fill the storage",
    "2,3 -> 5: 0:2=2@3 0:3=3@1": "boxes do not fill the storage",
    "2,3 -> 7: 0:2=2@3 0:3=3@1": "boxes do not fill the storage",
    "2,3 -> 6: 0:2=2@1 0:3=3@1": "boxes do not fill the storage",
    "2,3 -> 6: 0:2=2@300 0:3=3@1": "boxes do not fill the storage",
    "2,4 -> 8: 0:2=2@2 0:2=2@1; 0:2=2@2 2:4=2@1 +3": "boxes do not fill the storage",
    "2,3 -> 6:": "boxes do not hold every element once",
    "?,3 -> 3: 0:3=3@1": "axes of any size must be axes of the storage",
    "2,0 -> 6:": "nothing is stored",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_a_layout_is_refused(text: str) -> None:
    with pytest.raises(RlxError, match=WRONG[text]):
        Layout.parse(text)


def test_random_changes_of_a_text_are_refused_or_stay_inside() -> None:
    """No offset of an accepted layout is outside its storage, and none is used twice."""
    own = [Panels(3, 10, 4, 2, 2).layout, KernelPanels((6, 5, 2), 2, 2, 2, 2).layout]
    accepted = 0
    for _ in range(3000):
        text = list(str(RNG.choice(own)))
        for _ in range(RNG.randrange(1, 3)):
            text[RNG.randrange(len(text))] = RNG.choice("0123456789@=,:;+* ")
        try:
            found = Layout.parse("".join(text))
        except RlxError:
            continue
        accepted += 1
        sizes = [n for n in found.sizes if n is not None]
        offsets = [found.offset(point) for point in np.ndindex(*sizes)]
        assert len(set(offsets)) == len(offsets) and all(0 <= at < found.elements for at in offsets)
    assert accepted > 20


def test_kinds_of_values() -> None:
    own = Panels(3, 10, 4, 2).layout
    assert layout(own) is own and layout(str(own)) == own
    with pytest.raises(ValueError, match="needs a layout, got 3"):
        layout(3)


def test_parameters_are_checked() -> None:
    for make in (
        lambda: Panels(3, 10, -4, 2),
        lambda: Panels(-3, 10, 4, 2),
        lambda: KernelPanels((3, 4, 2), 2, 4, 2, 1),
        lambda: KernelPanels((4, 4, 2), 1, 4, 2, 3, 2),
        lambda: ChannelBlocks(4, 3, 0),
        lambda: ChannelBlocks(1, 3, 2),
    ):
        with pytest.raises(RlxError):
            make()
