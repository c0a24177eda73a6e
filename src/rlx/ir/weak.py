"""Numbers among the arguments of a traced function. Like literals, they take the dtype of the other operand.

NumPy 2 treats its own scalars otherwise: np.float64(2) times an f32 array is f64 there, and f32 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.dtype import DType, dtype
from rlx.ir.node import Node
from rlx.records import dataclass

Number = bool | int | float | complex | np.generic
NUMBERS = (bool, int, float, complex, np.generic)
WIDE = {bool: "bool", int: "i64", float: "f64", complex: "c128"}


def carried(value: Number) -> DType:
    """The dtype in which a program takes a number: Python's are not rounded before their dtype is known."""
    return dtype(value.dtype if isinstance(value, np.generic) else WIDE[type(value)])


def default(value: Number) -> DType:
    """The dtype of a number that no tensor decides."""
    return dtype(value.dtype if isinstance(value, np.generic) else type(value))


@dataclass(frozen=True, eq=False)
class Weak:
    """One number: the input that holds it, and which argument it is."""

    input: Node
    number: int


class WeakNumbers:
    """The numbers among the arguments of a function that is being traced."""

    def __init__(self) -> None:
        self.nodes: dict[Node, Weak] = {}
        self.ranges: dict[int, DType] = {}  # argument -> the narrowest integers that it must fit

    def beside(self, weak: Weak, to: DType) -> Node:
        """The number in the dtype of the tensor it is combined with."""
        own = weak.input.dtype
        fits = (
            to.is_complex
            or (to.is_float and not own.is_complex)
            or (to.is_int and (own.is_int or own.is_bool))
        )
        if not (fits or own.is_bool):
            raise DTypeError(
                f"a number of {own} cannot be combined with a tensor of {to}; cast the tensor first"
            )
        if own.is_int and to.is_int:
            known = self.ranges.get(weak.number, to)
            self.ranges[weak.number] = min(known, to, key=lambda d: d.max_value - d.min_value)
        return weak.input if own is to else weak.input._call("cast", weak.input, dtype=to)


WEAK: ContextVar[WeakNumbers | None] = ContextVar("rlx_weak_numbers", default=None)


def check_ranges(ranges: Mapping[int, DType], arrays: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Refuse a number that does not fit the integers it is combined with."""
    for number, to in ranges.items():
        value = int(arrays[number])
        if not to.min_value <= value <= to.max_value:
            raise DTypeError(
                f"{names[number]} is {value}, which does not fit {to} ({to.min_value} to {to.max_value}); "
                "cast the tensor it is combined with to a wider dtype first"
            )
