"""Block formats of GGUF files: bytes of blocks to small integers with one factor for each group of them.

Every format is the same kind of number: `scale * code`, or `scale * code - minimum`, with a code of at most
eight bits and factors for each group of neighbours in a row. `Groups` holds that, so what reads weights knows
one form. Factors are numbers, or small codes that share a number (`Shared`). Written out in f32, the numbers
have the bits that llama.cpp's own Python package gives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.kernel.nibbles import E2M1_DOUBLED
from rlx.records import dataclass

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Shared:
    """Rows of factors that are codes (i8) times numbers of f16, one for several neighbours.

    >>> Shared(np.array([[1, 2, 3, 4]], np.int8), np.array([[0.5, 2]], np.float16)).numbers().tolist()
    [[0.5, 1.0, 6.0, 8.0]]
    """

    codes: Array
    of_blocks: Array

    def numbers(self) -> Array:
        """The factors in f32, which holds these products exactly."""
        *lead, columns = self.codes.shape
        parts = self.codes.reshape(*lead, self.of_blocks.shape[-1], -1).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            return (parts * self.of_blocks[..., None].astype(np.float32)).reshape(*lead, columns)

    def reshape(self, *shape: int) -> Shared:
        return Shared(self.codes.reshape(*shape), self.of_blocks.reshape(*shape))

    def __getitem__(self, rows: Array) -> Shared:
        return Shared(self.codes[rows], self.of_blocks[rows])


Factors = Array | Shared


def numbers(factors: Factors) -> Array:
    """Factors as f32."""
    return factors.numbers() if isinstance(factors, Shared) else factors


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows of codes (i8 or u8) with f32 or shared factors for each `group` of columns.

    >>> rows = Groups(np.array([[1, 2, 3, 4]], np.int8), np.array([[0.5, 2]], np.float32))
    >>> rows.group, rows.numbers().tolist()
    (2, [[0.5, 1.0, 6.0, 8.0]])
    """

    codes: Array
    scales: Factors
    minimums: Factors | None = None

    @property
    def group(self) -> int:
        """Columns that share a factor."""
        factors = self.scales.codes if isinstance(self.scales, Shared) else self.scales
        return int(self.codes.shape[-1]) // max(int(factors.shape[-1]), 1)

    def numbers(self) -> Array:
        """The numbers in f32."""
        *lead, columns = self.codes.shape
        levels = self.codes.reshape(*lead, -1, self.group).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold anything
            levels *= numbers(self.scales)[..., None]
            if self.minimums is not None:
                levels -= numbers(self.minimums)[..., None]
        return levels.reshape(*lead, columns)

    def reshaped(self, *lead: int) -> Groups:
        """The same rows under other leading sizes."""
        least = None if self.minimums is None else self.minimums.reshape(*lead, -1)
        return Groups(self.codes.reshape(*lead, -1), self.scales.reshape(*lead, -1), least)


@dataclass(frozen=True)
class Format:
    """A type of tensors: a block of `size` elements takes `bytes` bytes."""

    name: str
    size: int
    bytes: int
    decode: Callable[[Array], Groups] | None = None
    """Blocks [count, bytes] to rows of one block each; None for plain floating-point numbers."""
    group: int = 0
    """Elements that share a factor."""
    bits: int = 0
    """Bits that a code needs."""
    minimums: bool = False
    halves: bool = False
    """Whether factors are f16 in the file."""
    block: int = 0
    """Groups whose factors share a number; 0 where each is a number."""
    e2m1: bool = False
    """Whether codes are twice the numbers of that type, and scales powers of 2."""


def _half(blocks: Array) -> Array:
    """Two bytes of each block as f32."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _shared(codes: Array, numbers: Array) -> Shared:
    """Codes of factors in bytes, and two bytes of the number that each block has for them."""
    stored = np.ascontiguousarray(codes).view(np.int8)
    return Shared(stored, np.ascontiguousarray(numbers).view("<f2").astype(np.float16))


def _nibbles(packed: Array, run: int) -> Array:
    """Low halves of `run` bytes, then their high halves, and so on."""
    parts = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), -1)


def _fields(packed: Array, width: int, run: int) -> Array:
    """Fields of `width` bits, the lowest first: those of all bytes of a `run`, then their next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts
    return (parts & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _signed(codes: Array, middle: int) -> Array:
    return codes.astype(np.int8) - np.int8(middle)


def _q4_0(b: Array) -> Groups:
    return Groups(_signed(_nibbles(b[:, 2:], 16), 8), _half(b[:, :2]))


def _q4_1(b: Array) -> Groups:
    return Groups(_nibbles(b[:, 4:], 16), _half(b[:, :2]), -_half(b[:, 2:4]))


def _fifth_bits(packed: Array) -> Array:
    """The upper bit of each of 32 codes, in place."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q5_0(b: Array) -> Groups:
    codes = _nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])
    return Groups(_signed(codes, 16), _half(b[:, :2]))


def _q5_1(b: Array) -> Groups:
    codes = _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8])
    return Groups(codes, _half(b[:, :2]), -_half(b[:, 2:4]))


def _q8_0(b: Array) -> Groups:
    return Groups(b[:, 2:].view(np.int8), _half(b[:, :2]))


def _q2_k(b: Array) -> Groups:
    factors, codes = b[:, :16], _fields(b[:, 16:80], 2, 32)
    return Groups(codes, _shared(factors & 15, b[:, 80:82]), _shared(factors >> 4, b[:, 82:84]))


def _q3_k(b: Array) -> Groups:
    low, high = _nibbles(b[:, 96:104], 8), _fields(b[:, 104:108], 2, 4)
    codes = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    return Groups(_signed(codes, 4), _shared(_signed(low | high << 4, 32), b[:, 108:110]))


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of six bits in twelve bytes."""
    scales, least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=1),
        np.concatenate([least & 63, rest >> 4 | least >> 2 & 48], axis=1),
    )


def _with_minimums(b: Array, codes: Array) -> Groups:
    scales, least = _six_bit_pairs(b[:, 4:16])
    return Groups(codes, _shared(scales, b[:, :2]), _shared(least, b[:, 2:4]))


def _q4_k(b: Array) -> Groups:
    return _with_minimums(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: Array) -> Groups:
    return _with_minimums(b, _nibbles(b[:, 48:], 32) | _fields(b[:, 16:48], 1, 32) << 4)


def _q6_k(b: Array) -> Groups:
    codes = _nibbles(b[:, :128], 64) | _fields(b[:, 128:192], 2, 32) << 4
    return Groups(_signed(codes, 32), _shared(b[:, 192:208], b[:, 208:210]))


# The levels of the formats whose four bits are places in a table.
_UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip


def _iq4_nl(b: Array) -> Groups:
    return Groups(_UNEVEN[_nibbles(b[:, 2:], 16)], _half(b[:, :2]))


def _iq4_xs(b: Array) -> Groups:
    low = _fields(b[:, 4:8], 4, 1)
    high = _fields(b[:, 2:4], 2, 1)
    return Groups(_UNEVEN[_nibbles(b[:, 8:], 16)], _shared(_signed(low | high << 4, 32), b[:, :2]))


def halved_powers(exponents: Array) -> Array:
    """2 ** (exponent - 128) of bytes: half of MXFP4's scales, because the codes are doubled.

    >>> halved_powers(np.array([128, 130], np.uint8)).tolist()
    [1.0, 4.0]
    """
    wide = exponents.astype(np.uint32)
    small = np.uint32(0x200000) << np.minimum(wide, 1)
    bits = np.where(wide < 2, small, np.maximum(wide, 1) - 1 << 23)
    return bits.view(np.float32)


def _mxfp4(b: Array) -> Groups:
    return Groups(E2M1_DOUBLED[_nibbles(b[:, 1:], 16)], halved_powers(b[:, :1]))


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18, _q4_0, 32, 4, halves=True),
    3: Format("Q4_1", 32, 20, _q4_1, 32, 4, minimums=True, halves=True),
    6: Format("Q5_0", 32, 22, _q5_0, 32, 5, halves=True),
    7: Format("Q5_1", 32, 24, _q5_1, 32, 5, minimums=True, halves=True),
    8: Format("Q8_0", 32, 34, _q8_0, 32, 8, halves=True),
    10: Format("Q2_K", 256, 84, _q2_k, 16, 2, minimums=True, block=16),
    11: Format("Q3_K", 256, 110, _q3_k, 16, 3, block=16),
    12: Format("Q4_K", 256, 144, _q4_k, 32, 4, minimums=True, block=8),
    13: Format("Q5_K", 256, 176, _q5_k, 32, 5, minimums=True, block=8),
    14: Format("Q6_K", 256, 210, _q6_k, 16, 6, block=16),
    20: Format("IQ4_NL", 32, 18, _iq4_nl, 32, 8, halves=True),
    23: Format("IQ4_XS", 256, 136, _iq4_xs, 32, 8, block=8),
    30: Format("BF16", 1, 2),
    39: Format("MXFP4", 32, 17, _mxfp4, 32, 5, e2m1=True),
}
"""By the number that files have for them."""

OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Formats that exist and are not read."""


def decode(format: Format, rows: Array) -> Groups:
    """Bytes [rows, bytes of a row] as groups.

    >>> block = np.zeros((1, 18), np.uint8)
    >>> block[0, :3] = 0, 0x3C, 0x19  # a scale of 1, then the codes 9 and, 16 later, 1
    >>> decode(FORMATS[2], block).numbers()[0, [0, 1, 16]].tolist()
    [1.0, -8.0, -7.0]
    """
    assert format.decode is not None, format.name
    with np.errstate(invalid="ignore", over="ignore"):
        return format.decode(rows.reshape(-1, format.bytes)).reshaped(len(rows))
