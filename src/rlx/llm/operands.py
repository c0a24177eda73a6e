"""Weights as the graph takes them: the arrays that a tensor of a file becomes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np

from rlx.kernel.nibbles import packed
from rlx.llm.blocks import Format, Groups, halved_powers
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
    """Bits of a code in the storage that matmuls read: 4 or 8."""
    return 4 if format.bits <= 4 else 8


def matrix_parts(entry: Entry) -> list[Part]:
    """The operands of `ops.dequantize_groups` for a matrix: codes [in, out], scales, perhaps zero points."""
    out, size = entry.shape
    groups, format = (size // entry.format.group, out), entry.format
    about: About = [("", (size, out), "i8"), (".scales", groups, "f16" if format.halves else "f32")]
    if format.minimums:
        about.append((".zeros", groups, "f32"))
    return _parts(entry, lambda own: operands_of(own.format, _groups(own)), about)


def operands_of(format: Format, groups: Groups) -> list[Array]:
    """Codes, scales and zero points: columns of numbers (code - zero) * scale.

    Numbers scale * code + minimum have zero = -minimum / scale, rounded once. Where the scale is 0 the number
    is the minimum: (0 - -1) * minimum.

    >>> from rlx.llm.blocks import FORMATS
    >>> one = Groups(np.array([[3, 5]], np.int8), np.array([[2]], np.float32), np.array([[4]], np.float32))
    >>> [part.tolist() for part in operands_of(FORMATS[3], one)]
    [[[-5], [-3]], [[2.0]], [[-10.0]]]
    """
    return [np.ascontiguousarray(part.T) for part in _centred(format, groups)]


def _centred(format: Format, groups: Groups) -> list[Array]:
    """The same, row by row."""
    codes, scales, least = groups.codes, groups.scales, groups.minimums
    if least is None:
        return [codes, scales.astype(np.float16) if format.halves else scales]
    middle = 8 if stored_bits(format) == 4 else 0  # codes of four bits are stored with a sign
    flat = scales == 0
    factors = np.where(flat, least, scales)
    zeros = -least / np.where(flat, np.float32(1), scales) - np.float32(middle)
    zeros[flat] = -1
    centred = codes - np.int8(middle)
    if flat.any():
        centred[np.repeat(flat, groups.group, axis=-1)] = 0
    return [centred, factors.astype(np.float16) if format.halves else factors, zeros]


# -- experts


def expert_coding(format: Format) -> str:
    """How `ops.expert_matmul` reads the codes of a format."""
    return "e2m1" if format.e2m1 else f"i{stored_bits(format)}"


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
