"""Layouts: one description gives packing, offsets, their inverse and text, and what is wrong is refused."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import rlx
from coded_weights import coded_weights
from rlx.errors import DTypeError, RlxError, ShapeError
from rlx.ir.op import all_ops
from rlx.kernel.layout import Layout, layout
from rlx.kernel.panels import (
    ChannelBlocks,
    KernelPanels,
    Panels,
    QuantLayout,
    blocks_of,
    groups_of,
    quantised_of,
)
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
    if packed.ndim > 1:
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


@pytest.mark.parametrize("_", range(30))
def test_bits(_: int) -> None:
    """Codes of 4 bits are words of 8 k, the even ones in the low half; those of 8 bits come k by k."""
    bits, group, lanes = RNG.choice([4, 8]), 8 * RNG.randrange(1, 4), RNG.choice([1, 2, 4])
    scale, zeros = RNG.choice(["f16", "f32"]), RNG.choice([False, True])
    q = QuantLayout(RNG.randrange(1, 50), RNG.randrange(1, 20), bits, group, lanes, scale, zeros)
    low = -(1 << (bits - 1))
    x = np.random.default_rng(0).integers(low, -low, (2, q.k, q.n)).astype(np.int8)
    counted = np.arange(1, 2 * (1 + zeros) * q.groups * q.n + 1, dtype=scale.replace("f", "float"))
    factors = counted.reshape(1 + zeros, 2, q.groups, q.n)
    codes = np.zeros((2, q.panels, q.groups, group * q.columns), np.int8)
    wide = np.zeros((1 + zeros, 2, q.panels, q.groups, q.columns), factors.dtype)
    for k, n in np.ndindex(q.k, q.n):
        (panel, column), (part, row) = divmod(n, q.columns), divmod(k, group)
        words = (row // 8 * q.columns + column) * 8 + row % 8 // 2 + row % 2 * 4
        codes[:, panel, part, words if bits == 4 else row * q.columns + column] = x[:, k, n]
        wide[:, :, panel, part, column] = factors[:, :, part, n]
    stored = codes.view(np.uint8)
    if bits == 4:
        stored = (codes[..., 0::2] + 8 | (codes[..., 1::2] + 8) << 4).astype(np.uint8)
    want = np.concatenate([*wide.view(np.uint8), stored], axis=-1).reshape(2, -1)
    np.testing.assert_array_equal(q.pack(x, *factors), want)
    for own, part in zip(q.layouts, (x, *factors), strict=True):
        assert Layout.parse(str(own)) == own
        np.testing.assert_array_equal(own.unpack(want), part)
        offsets = [own.offset(point) for point in np.ndindex(*part.shape[1:])]
        assert len(set(offsets)) == len(offsets) and 0 <= min(offsets) <= max(offsets) < own.elements
    assert quantised_of(q.layouts, group, lanes) == q
    assert quantised_of(q.layouts, group + 8, lanes) is quantised_of(q.layouts, group, lanes + 1) is None
    assert quantised_of(q.layouts[1:], group, lanes) is None


@pytest.mark.parametrize("minimums", [False, True])
def test_blocks_of_groups(minimums: bool) -> None:
    """Factors of a block, then the codes of factors of all its groups, then the codes of these."""
    q = QuantLayout(40, 3, 8, 8, 2, "f16", minimums=minimums, block=3)
    rng, many = np.random.default_rng(0), 1 + minimums
    codes = rng.integers(0, 127, (40, 3)).astype(np.uint8 if minimums else np.int8)
    of_groups = rng.integers(-9, 99, (many, 5, 3)).astype(np.int8)
    of_blocks = rng.standard_normal((many, 2, 3)).astype(np.float16)
    parts = [codes, *(x for pair in zip(of_groups, of_blocks, strict=True) for x in pair)]
    stored = q.pack(*parts).reshape(1, 2, -1)
    for block in range(2):
        here, at = stored[0, block], 0
        for factor in of_blocks:
            np.testing.assert_array_equal(here[at : at + 6].view(np.float16), factor[block])
            at += 8
        for factor in of_groups:
            rows = here[at : at + 12].view(np.int8).reshape(3, 4)[:, :3]
            own = factor[3 * block : 3 * block + 3]
            np.testing.assert_array_equal(rows[: len(own)], own)
            at += 12
        own = codes[24 * block : 24 * block + 24]
        assert at == q.codes_start
        np.testing.assert_array_equal(here[at:].view(codes.dtype).reshape(24, 4)[: len(own), :3], own)
    for stored_as, value in zip(q.layouts, parts, strict=True):
        np.testing.assert_array_equal(stored_as.unpack(q.pack(*parts)), value)
    assert quantised_of(q.layouts, 8, 2, block=3) == q
    assert quantised_of(q.layouts, 8, 2, block=2) is quantised_of(q.layouts, 8, 2) is None


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(
    ("k", "n", "group", "block"), [(64, 32, 32, 0), (33, 5, 16, 0), (100, 70, 48, 2), (1, 1, 16, 0)]
)
def test_six_bits(lanes: int, k: int, n: int, group: int, block: int, minimums: bool) -> None:
    """A byte has a code in its lower bits; three bytes have those of a fourth in the bits that are left."""
    coded = coded_weights(QuantLayout(k, n, 6, group, lanes, "f16", minimums=minimums, block=block))
    q, packed = coded.layout, coded.packed
    assert q.bits == 6 and Layout.parse(str(q.codes)) == q.codes
    for own, part in zip(q.layouts, (coded.codes, *coded.stored), strict=True):
        np.testing.assert_array_equal(own.unpack(packed), part)
    assert quantised_of(q.layouts, group, lanes, block=block) == q
    assert quantised_of(q.layouts, group, lanes // 2, block=block) is None
    blocks = packed.reshape(q.panels, q.blocks, q.block_bytes)[..., q.codes_start :]
    words = blocks.reshape(q.panels, -1, 2, 3, lanes, 4)  # sets, vectors of columns, bytes
    for row, column in np.ndindex(k, n):
        panel, rest = divmod(column, q.columns)
        own = words[panel, row // 16, rest // lanes, :, rest % lanes, (0, 2, 1, 3)[row % 4]].astype(int)
        quad = row % 16 // 4
        code = own[quad] & 63 if quad < 3 else sum(left >> 6 << 2 * i for i, left in enumerate(own))
        assert code - (0 if minimums else 32) == coded.codes[row, column]


def test_where_codes_of_six_bits_take_eight() -> None:
    """Sets have 16 k, and as many columns as a vector of a target."""
    for group, lanes, bits in ((16, 4, 6), (48, 16, 6), (8, 4, 8), (40, 8, 8), (16, 2, 8)):
        q = QuantLayout(80, 9, 6, group, lanes, quads=True)
        assert q == QuantLayout(80, 9, bits, group, lanes, quads=bits == 8)
    q = QuantLayout(16, 2, 6, 16, 4)
    with pytest.raises(ShapeError, match=r"codes of 6 bits must be in -32\.\.31, not 0\.\.32"):
        q.codes.pack(np.full((16, 2), 32, np.int8))
    text = str(q.codes)
    assert text == "i6+32x4 16,2 -> 128: 0:16=4@12,2@3,2@6 0:2=8@48 +128"
    for wrong, told in (
        (text.replace("+128", "+127"), "not whole bytes"),
        (text.replace("8@48", "2@48"), "not whole bytes"),  # half a set
        (text.replace("2@6", "2@5"), "overlap"),
        (text.replace("+128", "+132"), "outside the storage"),
    ):
        with pytest.raises(ShapeError, match=told):
            Layout.parse(wrong)


def test_other_tensors_of_a_storage_stay() -> None:
    q = QuantLayout(8, 2, bits=4, group=8, lanes=1)
    full = np.full(q.nbytes, 0xA5, np.uint8)
    stored = q.codes.pack(np.zeros((8, 2), np.int8), full)
    assert (stored[: q.codes_start] == 0xA5).all() and (stored[q.codes_start :] == 0x88).all()
    assert (full == 0xA5).all()


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
    "i5 2,3 -> 6: 0:2=2@3 0:3=3@1": "is not a layout",
    "f32 2,3 -> 23: 0:2=2@3 0:3=3@1": "23 bytes are not whole elements f32",
    "f32 2,3 -> 20: 0:2=2@3 0:3=3@1": "elements overlap, or are outside the storage",
    "f32 2,3 -> 24: 0:2=2@3 0:3=3@1 +1": "elements overlap, or are outside the storage",
    "f32 2,3 -> 24: 0:2=2@2 0:3=3@1": "elements overlap, or are outside the storage",
    "f32 2,3 -> 24: 0:2=2@1 0:3=3@1": "elements overlap, or are outside the storage",
    "f32 2,4 -> 99: 0:2=2@2 0:2=2@1; 0:2=2@2 2:4=2@1 +4": "99 bytes are not whole",
    "f32 2,4 -> 96: 0:2=2@2 0:2=2@1; 0:2=2@2 2:4=2@1 +4": "elements in bytes are one box",
    "f32 2,3 -> 2,12: 0:2=2@3 0:3=3@1": "bytes are stored along one axis",
    "f32 3 -> 12: 0:3=3@1": "bytes are stored along one axis",
    "f32 ?,3 -> ?,12: 0:3=3@1": "bytes are stored along one axis",
    "i4+8 2,3 -> 8: 0:2=2@4 0:3=3@1": "elements side by side are not whole bytes",
    "i4+8 2,2 -> 8: 0:2=2@3 0:2=2@1": "elements side by side are not whole bytes",
    "i4+8 2,2 -> 8: 0:2=2@4 0:2=2@1 +1": "elements side by side are not whole bytes",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_a_layout_is_refused(text: str) -> None:
    with pytest.raises(RlxError, match=WRONG[text]):
        Layout.parse(text)


def test_no_text_is_too_long_to_refuse() -> None:
    digits = ",".join(["2@1"] * 5000)
    ones = ",".join(["1"] * 5000)
    for text in (
        f"2 -> 2: 0:2={digits}",
        f"{ones} -> 1: " + " ".join(["0:1"] * 5000),
        "9 -> 9:" + " 0:9;" * 5000,
    ):
        with pytest.raises(RlxError, match=r"more than 64|a box has"):
            Layout.parse(text)


def test_random_changes_of_a_text_are_refused_or_stay_inside() -> None:
    """No offset of an accepted layout is outside its storage, and none is used twice."""
    own = [Panels(3, 10, 4, 2, 2).layout, KernelPanels((6, 5, 2), 2, 2, 2, 2).layout]
    own += QuantLayout(9, 5, bits=4, group=8, lanes=2, zeros=True).layouts
    own.append(QuantLayout(17, 5, bits=6, group=16, lanes=4).codes)
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
        x = np.arange(len(offsets), dtype=np.int8).reshape(sizes) % 16
        given = x if found.packed is None else (x - found.packed.shift).astype(found.packed.dtype.np)
        np.testing.assert_array_equal(found.unpack(found.pack(given)), given)
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


# -- one owner

SOURCES = Path(rlx.__file__).parent
OWNERS = {"kernel/boxes.py", "kernel/layout.py", "kernel/panels.py", "kernel/quads.py"}
OWNED = {"Panels", "KernelPanels", "ChannelBlocks", "QuantLayout"}
TRANSFORMED = {  # weights that are computed, or whose places depend on their values
    "pack_winograd",
    "unpack_winograd",
    "pack_quads",
    "unpack_quads",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield path.relative_to(SOURCES).as_posix(), ast.parse(path.read_text("utf-8"))


def intruders(name: str, tree: ast.Module) -> Iterator[str]:
    """Places outside of the owners that decide where packed elements are stored."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rlx.kernel.boxes":
            yield f"{name}:{node.lineno} makes boxes and digits"
        elif isinstance(node, ast.ClassDef) and node.name in OWNED:
            yield f"{name}:{node.lineno} has a class {node.name} of its own"
        elif isinstance(node, ast.Attribute) and node.attr in ("full", "tail", "depth"):
            if ast.unparse(node.value).endswith("panels") and not name.startswith("codegen/cpu/"):
                yield f"{name}:{node.lineno} computes places in panels"


def test_layouts_have_one_owner() -> None:
    """`kernel/layout.py` and its parts alone know where packed elements are.

    Emitters walk through panels, but compare them with the stated layout first.
    """
    found = [w for name, tree in trees() if name not in OWNERS for w in intruders(name, tree)]
    assert not found
    assert {name for name, _ in trees()} >= OWNERS
    text = "from rlx.kernel.boxes import Box\nclass Panels: pass\nat = own.panels.depth * 3"
    assert len(list(intruders("other.py", ast.parse(text)))) == 3


def test_only_one_pair_of_ops_states_layouts() -> None:
    units = {op.name for op in all_ops() if {"columns", "lanes"} & set(op.attrs)}
    assert units == TRANSFORMED
    assert {op.name for op in all_ops() if "layout" in op.attrs} == {"store_as", "read_as"}


def test_graphs_bound_offsets_by_the_layout() -> None:
    """The type rule, which the verifier repeats, takes a storage of the layout's size only."""
    own, g = Panels(3, 10, 4, 2).layout, rlx.Graph("g")
    for op, sizes in (("read_as", (29,)), ("read_as", ()), ("store_as", (3, 11)), ("store_as", (10,))):
        with pytest.raises(ShapeError, match=f"{op}: .* has not the sizes of the layout"):
            rlx.ir.op.get_op(op)(g.input(f"{op}{sizes}", sizes, "f32"), layout=own)
    codes, scales = QuantLayout(8, 2, bits=4, group=8, lanes=1).layouts
    shapes = ((8, 2), "f32"), ((1, 2), "f16"), ((16,), "i8"), ((16,), "u8")
    x, half, signed, stored = (g.input(f"of{d}{s}", s, d) for s, d in shapes)
    for op, operands, stated in (
        ("store_as", (x,), codes),
        ("store_as", (half,), scales),
        ("store_as", (g.input("f", (1, 2), "f32"), signed), scales),
        ("store_as", (g.input("f2", (1, 2), "f32"), stored, stored), scales),
        ("read_as", (signed,), codes),
    ):
        with pytest.raises(DTypeError, match=f"{op}: .* (has not the elements|does not hold the bytes)"):
            rlx.ir.op.get_op(op)(*operands, layout=stated)
    with pytest.raises(ShapeError, match="has no room for other tensors"):
        rlx.ir.op.get_op("store_as")(g.input("y", (3, 10), "f32"), stored, layout=own)
    symbolic = rlx.ir.op.get_op("read_as")(g.input("x", ("n",), "f32"), layout=own)
    assert symbolic.shape == (3, 10) and "n" in str(g.constraints[0].describe())
