"""Types of values: a tensor has a dtype and a shape of dims; a multi-output op has a tuple of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from rlx.errors import ParseError, ShapeError
from rlx.ir.dim import Dim, Expr, evaluate, parse_dim, substitute, symbols
from rlx.ir.dtype import DType, dtype
from rlx.records import dataclass

Shape: TypeAlias = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype and shape of one value.

    >>> from rlx.ir.dim import sym
    >>> str(TensorType(dtype("f32"), (1, sym("seq"), 4)))
    'f32[1,seq,4]'
    """

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        """Number of elements, possibly symbolic."""
        total: Dim = 1
        for d in self.shape:
            total = total * d
        return total

    @property
    def nbytes(self) -> Dim:
        """Bytes of dense storage, possibly symbolic; sub-byte elements take one byte each, as in NumPy."""
        return self.numel * self.dtype.itemsize

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    def with_shape(self, shape: Shape) -> TensorType:
        return TensorType(self.dtype, shape)

    def with_dtype(self, new: DType) -> TensorType:
        return TensorType(new, self.shape)

    def bind(self, binding: dict[str, int]) -> tuple[int, ...]:
        """The shape with every symbol replaced by its value."""
        return tuple(d if isinstance(d, int) else evaluate(d, binding) for d in self.shape)

    def substitute(self, mapping: dict[str, Dim]) -> TensorType:
        return TensorType(self.dtype, tuple(substitute(d, mapping) for d in self.shape))


@dataclass(frozen=True, slots=True)
class TupleType:
    """Type of a node with several results; the results themselves are `result` nodes."""

    items: tuple[TensorType, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))})"


Type: TypeAlias = TensorType | TupleType


MOST_ELEMENTS = 1 << 56
"""Of a value, stored or not: bytes and offsets are numbers of 64 bits."""


def check_sizes(what: str, of: TensorType) -> None:
    """Refuse a shape that no array has: with a size below 0, or with more elements than can be counted.

    >>> check_sizes("broadcast_to", TensorType(dtype("f32"), (2, -1)))
    Traceback (most recent call last):
    rlx.errors.ShapeError: broadcast_to: f32[2,-1] has a size below 0; give sizes of 0 or more...
    """
    elements = 1
    for d in of.shape:
        if isinstance(d, int):
            if d < 0:
                raise ShapeError(f"{what}: {of} has a size below 0; give sizes of 0 or more")
            elements *= max(d, 1)
    if elements > MOST_ELEMENTS:
        raise ShapeError(f"{what}: {of} has more elements than RLX can count; give smaller sizes")


def tensor_types(type_: Type) -> tuple[TensorType, ...]:
    """The tensors of a type, one or several."""
    return type_.items if isinstance(type_, TupleType) else (type_,)


def type_symbols(type_: Type) -> tuple[str, ...]:
    """Names of all symbols in a type, sorted."""
    names: set[str] = set()
    for t in tensor_types(type_):
        for d in t.shape:
            if not isinstance(d, int):
                names.update(symbols(d))
    return tuple(sorted(names))


_DIMS_PIECE = re.compile(r"[^,()`]++|`(?:[^`\\]|\\.)*+`|.", re.DOTALL)


def split_dims(text: str) -> list[str]:
    """Split at commas that are not inside parentheses or a backticked name."""
    parts, depth = [""], 0
    for piece in _DIMS_PIECE.findall(text):
        depth += (piece == "(") - (piece == ")")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts if text.strip() else []


def parse_type(text: str, symbols: Mapping[str, Expr] | None = None) -> TensorType:
    """The inverse of str(TensorType). `symbols` gives the symbol for some names, where their bounds matter.

    >>> str(parse_type("bf16[2,n*3]"))
    'bf16[2,3*n]'
    """
    text = text.strip()
    name, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]"):
        raise ParseError(f"type {text!r} is not of the form dtype[dims], for example f32[2,seq]")
    return TensorType(dtype(name.strip()), tuple(parse_dim(p, symbols) for p in split_dims(rest[:-1])))
