"""Types of values: a tensor has a dtype and a shape of dims; a multi-output op has a tuple of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rlx.ir.dim import Dim, evaluate, parse_dim, substitute, symbols
from rlx.ir.dtype import DType, dtype

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
        """Bytes of dense storage, possibly symbolic; sub-byte dtypes count as stored in NumPy (one byte each)."""
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


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that are not inside brackets or quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"`":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    tail = text[start:]
    return [p.strip() for p in [*parts, tail]] if text.strip() else []


def parse_type(text: str) -> TensorType:
    """The inverse of str(TensorType).

    >>> str(parse_type("bf16[2,n*3]"))
    'bf16[2,3*n]'
    """
    from rlx.errors import ParseError

    text = text.strip()
    name, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]"):
        raise ParseError(f"type {text!r} is not of the form dtype[dims], for example f32[2,seq]")
    return TensorType(dtype(name.strip()), tuple(parse_dim(p) for p in split_top(rest[:-1])))
