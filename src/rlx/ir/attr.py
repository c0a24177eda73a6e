"""Attributes of ops: each has a kind that checks a value and brings it to one canonical, hashable form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from rlx.ir.dim import Dim, Expr, sym
from rlx.ir.dtype import DType, dtype, plain_array
from rlx.records import dataclass

AttrValue: TypeAlias = Any
"""The value of an attribute: the kind in the schema of its op says what it is."""

Kind = Callable[[object], AttrValue]
K = TypeVar("K")


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Attr:
    """One attribute in an op's schema: a kind and a default (`REQUIRED` if there is none)."""

    kind: Kind
    default: object = REQUIRED


def integer(value: object) -> int:
    """A whole number (not a bool)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"needs an integer, got {value!r}")
    return int(value)


def positive(value: object) -> int:
    """A whole number of at least 1."""
    return _at_least(value, 1)


def whole(value: object) -> int:
    """A whole number of at least 0."""
    return _at_least(value, 0)


def _at_least(value: object, least: int) -> int:
    found = integer(value)
    if found < least:
        raise ValueError(f"needs an integer of at least {least}, got {value!r}")
    return found


def real(value: object) -> float:
    """A floating-point number."""
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"needs a number, got {value!r}")
    return float(value)


def number(value: object) -> int | float | bool:
    """A Python number whose int, float or bool nature matters."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"needs a number, got {value!r}")
    return value


def boolean(value: object) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"needs True or False, got {value!r}")
    return bool(value)


def string(value: object) -> str:
    """Text."""
    if not isinstance(value, str):
        raise ValueError(f"needs text, got {value!r}")
    return value


def dim(value: object) -> Dim:
    """A size: an int, a symbol name, or a dim expression."""
    if isinstance(value, str):
        return sym(value)
    if isinstance(value, Expr):
        return value
    return integer(value)


def _sequence(value: object) -> Iterable[object]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (tuple, list, np.ndarray, range)):
        raise ValueError(f"needs a sequence, got {value!r}")
    return value


def tuple_of(kind: Callable[[object], K]) -> Callable[[object], tuple[K, ...]]:
    """A tuple whose items are all of one kind."""

    def check(value: object) -> tuple[K, ...]:
        return tuple(kind(v) for v in _sequence(value))

    return check


ints = tuple_of(integer)
dims = tuple_of(dim)
reals = tuple_of(real)
strings = tuple_of(string)
pairs = tuple_of(ints)
dim_pairs = tuple_of(dims)


def dtype_kind(value: object) -> DType:
    """A dtype or its name."""
    return dtype(value)


def optional(kind: Callable[[object], K]) -> Callable[[object], K | None]:
    """None or a value of `kind`."""
    return lambda value: None if value is None else kind(value)


def one_of(*choices: str) -> Callable[[object], str]:
    """One of a few words."""

    def check(value: object) -> str:
        if value not in choices:
            raise ValueError(f"needs one of {', '.join(map(repr, choices))}, got {value!r}")
        return str(value)

    return check


class Described:
    """An attribute its own value class: `str` is its text, which its kind reads back."""

    __slots__ = ()


class Blob:
    """An immutable array as an attribute value; equal and hashed by dtype, shape and content."""

    __slots__ = ("_digest", "array")

    def __init__(self, array: np.ndarray) -> None:
        fixed = np.array(array, order="C", copy=True)
        fixed.flags.writeable = False
        self.array = fixed
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over dtype, shape and bytes."""
        if self._digest is None:
            import hashlib  # takes longer to import than all kinds of attributes

            head = f"{dtype(self.array.dtype)}{self.array.shape}".encode()
            self._digest = hashlib.sha256(head + self.array.tobytes()).hexdigest()
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Blob({dtype(self.array.dtype)}{list(self.array.shape)})"


def blob(value: object) -> Blob:
    """An array of a dtype that RLX knows."""
    if isinstance(value, Blob):
        return value
    array = plain_array(value, "a constant")
    dtype(array.dtype)
    return Blob(array)


def attr_key(value: object) -> object:
    """An attribute value as a dictionary key: 0.0 differs from -0.0, 1 from True, and NaN equals itself.

    >>> attr_key(0.0) == attr_key(-0.0), attr_key(1) == attr_key(True)
    (False, False)
    """
    kind = type(value)
    if kind is int or kind is str:
        return value
    if isinstance(value, tuple) and kind is tuple:
        return tuple([attr_key(v) for v in value])
    return (kind, repr(value)) if kind is float or kind is bool else value
