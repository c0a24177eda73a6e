"""Weights as the graph takes them: the arrays that a tensor of a file becomes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypedDict

import ml_dtypes
import numpy as np

from rlx import ops
from rlx.ir.graph import Node
from rlx.kernel.nibbles import packed
from rlx.llm.blocks import Format, Groups, Shared, halved_powers, numbers
from rlx.llm.tensors import Entry
from rlx.records import dataclass

Array = np.ndarray
Convert = Callable[[Entry], list[Array]]
About = list[tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True, eq=False)
class Part:
    """A param of the graph: what it is, known before the file is read, and its value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], Array]


def plain_part(entry: Entry) -> Part:
    """A tensor of floating-point numbers, as it is stored."""
    return Part(entry.name, entry.shape, entry.format.name.lower(), entry.array)


class _Decoded:
    """The groups of a tensor. Who takes one of its arrays will soon take the others: they are kept until
    then, and decoded again for who comes later."""

    def __init__(self, entry: Entry, convert: Convert) -> None:
        self.entry, self.convert = entry, convert
        self._left: dict[int, Array] = {}
        self._lock = threading.Lock()

    def take(self, number: int) -> Array:
        with self._lock:
            if number not in self._left:
                self._left = dict(enumerate(self.convert(self.entry)))
            return self._left.pop(number)


def _groups(entry: Entry) -> Groups:
    found = entry.groups()
    assert found is not None, entry.name
    return found


def _parts(entry: Entry, convert: Convert, about: About) -> list[Part]:
    """Params with these endings of names, shapes and dtypes."""
    decoded = _Decoded(entry, convert)

    def taker(number: int) -> Callable[[], Array]:
        return lambda: decoded.take(number)

    return [
        Part(f"{entry.name}{suffix}", shape, dtype, taker(number))
        for number, (suffix, shape, dtype) in enumerate(about)
    ]


def stored_bits(format: Format) -> int:
    """Bits of a code in the storage that matmuls read: 4, 6 or 8."""
    return next(bits for bits in (4, 6, 8) if format.bits <= bits)


def matrix_parts(entry: Entry) -> list[Part]:
    """The params of a matrix: codes [in, out], scales, perhaps minimums; of shared factors their codes, then
    the numbers of blocks."""
    (out, size), format = entry.shape, entry.format
    count, half = size // format.group, "f16" if format.halves else "f32"
    about: About = [("", (size, out), "u8" if format.minimums else "i8")]
    for name in (".scales", ".minimums")[: 1 + format.minimums]:
        if format.block:
            about += [(name, (count, out), "i8"), (f"{name}.blocks", (count // format.block, out), "f16")]
        else:
            about.append((name, (count, out), half))
    return _parts(entry, lambda own: operands_of(own.format, _groups(own)), about)


def operands_of(format: Format, groups: Groups) -> list[Array]:
    """The values of these params.

    >>> from rlx.llm.blocks import FORMATS
    >>> one = Groups(np.array([[3, 5]], np.uint8), np.array([[2]], np.float32), np.array([[4]], np.float32))
    >>> [part.tolist() for part in operands_of(FORMATS[3], one)]
    [[[3], [5]], [[2.0]], [[4.0]]]
    """
    parts = [groups.codes]
    for factor in (groups.scales, groups.minimums):
        if isinstance(factor, Shared):
            parts += [factor.codes, factor.of_blocks]
        elif factor is not None:
            parts.append(factor.astype(np.float16) if format.halves else factor)
    return [np.ascontiguousarray(part.T) for part in parts]


class Coding(TypedDict):
    """The attributes of `ops.dequantize_groups` and `ops.coded_matmul`."""

    bits: int
    group: int
    minimums: bool


def coding_of(format: Format) -> Coding:
    """Those of the matrices of a format."""
    return {"bits": stored_bits(format), "group": format.group, "minimums": format.minimums}


def coded_operands(format: Format, params: Sequence[Node]) -> list[Node]:
    """The operands of that op: params of `matrix_parts`, and shared factors as the same op gives them."""
    codes, *factors = params
    if not format.block:
        return [codes, *factors]
    pairs = zip(factors[::2], factors[1::2], strict=True)
    return [codes, *(ops.dequantize_groups(*pair, bits=8, group=format.block) for pair in pairs)]


def _centred(format: Format, groups: Groups) -> list[Array]:
    """Codes with a sign, scales and perhaps zero points, row by row: numbers (code - zero) * scale.

    Numbers scale * code - minimum have zero = minimum / scale, rounded once. Where the scale is 0 the number
    is -minimum: (0 - 1) * minimum.
    """
    codes, scales = groups.codes, numbers(groups.scales)
    if groups.minimums is None:
        return [codes, scales.astype(np.float16) if format.halves else scales]
    least = numbers(groups.minimums)
    middle = 8 if stored_bits(format) == 4 else 0  # codes of four bits are stored with a sign
    flat = scales == 0
    factors = np.where(flat, least, scales)
    zeros = least / np.where(flat, np.float32(1), scales) - np.float32(middle)
    zeros[flat] = 1
    centred = codes.view(np.int8) - np.int8(middle)
    if flat.any():
        centred[np.repeat(flat, groups.group, axis=-1)] = 0
    return [centred, factors.astype(np.float16) if format.halves else factors, zeros]


# -- experts


def expert_coding(format: Format) -> str:
    """How `ops.expert_matmul` reads the codes of a format."""
    if format.e2m1:
        return "e2m1"
    return "i4" if format.bits <= 4 else "i8"


def expert_parts(entry: Entry) -> list[Part]:
    """The weights of `ops.expert_matmul` for matrices [experts, out, in]: numbers, or codes with factors."""
    format = entry.format
    if format.decode is None:
        return [plain_part(entry)]
    *lead, size = entry.shape
    is_byte = expert_coding(format) == "i8"
    half = "bf16" if format.e2m1 else "f16" if format.halves else "f32"
    about: About = [
        ("", (*lead, size if is_byte else size // 2), "i8" if is_byte else "u8"),
        (".scales", (*lead, size // format.group), half),
    ]
    if format.minimums:
        about.append((".zeros", (*lead, size // format.group), "f32"))

    def rows(own: Entry) -> list[Array]:
        parts = e2m1_operands(*own.mxfp4()) if format.e2m1 else expert_operands(format, _groups(own))
        return [part.reshape(shape) for part, (_, shape, _) in zip(parts, about, strict=True)]

    return _parts(entry, rows, about)


def expert_operands(format: Format, groups: Groups) -> list[Array]:
    """Codes as `expert_coding` says, scales, perhaps zeros, row by row.

    >>> from rlx.llm.blocks import FORMATS
    >>> one = Groups(np.full((1, 32), 7, np.int8), np.array([[0.5]], np.float32))
    >>> codes, scales = expert_operands(FORMATS[2], one)
    >>> codes[0, :2].tolist(), scales.tolist()
    ([255, 255], [[0.5]])
    """
    (codes, *factors), coding = _centred(format, groups), expert_coding(format)
    return [codes if coding == "i8" else packed(codes, coding), *factors]


def e2m1_operands(codes: Array, exponents: Array) -> list[Array]:
    """Blocks of MXFP4 as they are stored, but for the code of -0, and their scales for doubled numbers.

    >>> codes, scales = e2m1_operands(np.array([[0x8F] * 16], np.uint8), np.array([129], np.uint8))
    >>> codes[0, :2].tolist(), scales.tolist()
    ([15, 15], [2.0])
    """
    low, high = codes & np.uint8(15), codes & np.uint8(240)
    low *= low != 8
    high *= high != 128
    low |= high
    return [low, halved_powers(exponents).astype(ml_dtypes.bfloat16)]
