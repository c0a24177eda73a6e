"""Types and literals of LLVM IR text. A type is its LLVM spelling: "i64", "ptr", "<16 x float>"."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

FLOATS = ("half", "bfloat", "float", "double")
_SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64", "ptr": "p0"}
_BYTES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8, "i1": 1}


@functools.cache
def vector(element_type: str, width: int) -> str:
    """Type of `width` lanes; one lane is the scalar itself, so one generator serves both.

    >>> vector("float", 16), vector("float", 1)
    ('<16 x float>', 'float')
    """
    return element_type if width == 1 else f"<{width} x {element_type}>"


@functools.cache  # few types are asked about very often
def element(type_: str) -> str:
    """Lane type of a vector type; a scalar is its own."""
    return type_.split(" x ")[1][:-1] if type_.startswith("<") else type_


@functools.cache
def width(type_: str) -> int:
    """Lanes of a type; 1 for a scalar."""
    return int(type_[1:].split(" x ")[0]) if type_.startswith("<") else 1


@functools.cache
def like(type_: str, element_type: str) -> str:
    """The type with the lanes of `type_` and elements of `element_type`.

    >>> like("<8 x float>", "i32")
    '<8 x i32>'
    """
    return vector(element_type, width(type_))


@functools.cache
def is_float(type_: str) -> bool:
    return element(type_) in FLOATS


@functools.cache
def bits(type_: str) -> int:
    """Bits of one lane."""
    lane = element(type_)
    return int(lane[1:]) if lane[0] == "i" else _BYTES[lane] * 8


@functools.cache
def size_bytes(type_: str) -> int:
    """Bytes of one lane in memory."""
    return max(1, bits(type_) // 8)


@functools.cache
def mangle(type_: str) -> str:
    """The suffix that names an overloaded intrinsic: v16f32, i64, p0."""
    lane = element(type_)
    suffix = _SUFFIX.get(lane, lane)
    return suffix if width(type_) == 1 else f"v{width(type_)}{suffix}"


def float_literal(type_: str, value: float) -> str:
    """`value` rounded to the float type, as LLVM writes it bit by bit."""
    lane = element(type_)
    if lane == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if lane == "bfloat":
        return f"0xR{_bfloat_bits(value):04X}"
    if lane == "float":
        value = _round_to_float(value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def literals(type_: str, values: Sequence[float]) -> list[str]:
    """Scalar constants with their type, those of a table: floats are converted all at once.

    >>> literals("double", [1, -0.0]) == [str(constant("double", x)) for x in (1, -0.0)]
    True
    """
    if type_ in ("float", "double"):
        try:
            code = f"<{len(values)}{'f' if type_ == 'float' else 'd'}"
            rounded = struct.unpack(code, struct.pack(code, *values))
        except OverflowError:  # a float32 becomes infinite, which `pack` refuses
            pass
        else:
            words = struct.unpack(f"<{len(values)}Q", struct.pack(f"<{len(values)}d", *rounded))
            return [f"{type_} 0x{word:016X}" for word in words]
    return [str(constant(type_, value)) for value in values]


def _round_to_float(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _bfloat_bits(value: float) -> int:
    if math.isnan(value):
        return 0x7FC0
    word: int = struct.unpack("<I", struct.pack("<f", _round_to_float(value)))[0]
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


class Value:
    """One SSA value or constant: its type and how to write it. Never changed: writing code makes millions,
    and a frozen dataclass takes four times as long to make."""

    __slots__ = ("text", "type")

    def __init__(self, type: str, text: str) -> None:
        self.type, self.text = type, text

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Value and self.text == other.text and self.type == other.type

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Value({self.type!r}, {self.text!r})"

    def __str__(self) -> str:
        return f"{self.type} {self.text}"

    @property
    def width(self) -> int:
        return width(self.type)

    @property
    def element(self) -> str:
        return element(self.type)


def constant(type_: str, value: float) -> Value:
    """The constant `value` in every lane of `type_`.

    >>> str(constant("<4 x i32>", 7)), str(constant("i1", True))
    ('<4 x i32> splat (i32 7)', 'i1 true')
    """
    if type_ == "i64" and value.__class__ is int and -(1 << 63) <= value < 1 << 63:  # by far the most
        return Value("i64", str(value))
    return _kept_constant(type_, value) if value else _constant(type_, value)  # -0.0 == 0.0


def _constant(type_: str, value: float) -> Value:
    lane = element(type_)
    if lane == "ptr":
        text = "null" if value == 0 else f"inttoptr (i64 {int(value)} to ptr)"
    elif lane in FLOATS:
        text = float_literal(lane, float(value))
    elif lane == "i1":
        text = "true" if value else "false"
    else:
        number, size = int(value), bits(lane)
        text = str(number if number < 1 << (size - 1) else number - (1 << size))
    return Value(type_, text if width(type_) == 1 else f"splat ({lane} {text})")


_kept_constant = functools.lru_cache(1024, typed=True)(_constant)


def lanes_of(type_: str, values: Sequence[float]) -> Value:
    """A constant vector with its own value in each lane."""
    lane = element(type_)
    parts = ", ".join(str(constant(lane, value)) for value in values)
    return Value(type_, f"<{parts}>") if width(type_) > 1 else constant(type_, values[0])
