"""What Python code may ask of a symbolic size: its number, and how it compares.

Without a value there is no answer, so these refuse. While a function is traced, a `SizeReader` answers from
the sizes of the call and notes what it said: the trace then holds for sizes with the same answers only.

`==` and `hash` have two meanings. RLX's own code compares dims as expressions (algebra); the function that is
traced asks about sizes. Which one is meant depends on the module of the caller.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from rlx.errors import ShapeError

if TYPE_CHECKING:
    from rlx.ir.dims.expr import Dim, Expr


class SizeReader(Protocol):
    """Answers for symbolic sizes while a function is traced."""

    def knows(self, d: Dim) -> bool:
        """Whether the call decides a size; data may decide it, too."""
        ...

    def read(self, e: Expr) -> int:
        """The value of a size that is read as a number; the trace holds for that number only."""
        ...

    def answer(self, relation: str, a: Dim, b: Dim) -> bool:
        """Whether a is "eq" or "le" b; the trace holds for sizes with the same answer only."""
        ...


_PACKAGE = __name__.partition(".")[0]
READER: ContextVar[SizeReader | None] = ContextVar("rlx_size_reader", default=None)


def asked_by_user() -> SizeReader | None:
    """The reader, if a function is traced and the caller of the caller is not code of this package."""
    reader = READER.get()
    if reader is None:
        return None
    module = sys._getframe(2).f_globals.get("__name__", "")
    return None if module == _PACKAGE or module.startswith(_PACKAGE + ".") else reader


Real: TypeAlias = float | np.floating | np.integer


class Readable:
    """The part of a symbolic size that needs its value."""

    __slots__ = ()

    def _reader(self) -> SizeReader:
        reader = READER.get()
        if reader is None:
            raise ShapeError(
                f"the size {self} is symbolic, so it has no value yet; bind its symbols first, "
                "or compare with known_eq, known_le or known_lt"
            )
        return reader

    def _read(self) -> int:
        return self._reader().read(self)  # type: ignore[arg-type]

    __int__ = __index__ = _read

    def __float__(self) -> float:
        return float(self._read())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy integers leave sums, products and quotients to us; any other function reads the number."""
        inputs = tuple(x[()] if isinstance(x, np.ndarray) else x for x in inputs)  # array(4) is np.int64(4)
        if ufunc in (np.equal, np.not_equal) and method == "__call__":
            one, other = inputs if isinstance(inputs[0], Readable) else reversed(inputs)
            reader = asked_by_user()
            same = equals(one, other, reader) if reader is not None else one == other
            return same is (ufunc is np.equal)
        exact = _EXACT.get(ufunc.__name__) if method == "__call__" and not options else None
        if exact is not None and all(isinstance(x, (Readable, int, np.integer)) for x in inputs):
            return exact(*(x if isinstance(x, Readable) else int(x) for x in inputs))
        return getattr(ufunc, method)(
            *(x._read() if isinstance(x, Readable) else x for x in inputs), **options
        )

    def _real_arithmetic(self, calculate: Callable[[Any, Any], Any], other: Any, swap: bool = False) -> Dim:
        """Arithmetic that leaves the whole numbers: it reads the size, and gives a plain number."""
        if isinstance(other, Readable):
            other = other._read()
        if not isinstance(other, (int, float, complex, np.generic)):
            return NotImplemented  # type: ignore[no-any-return]
        number: Dim = calculate(other, self._read()) if swap else calculate(self._read(), other)
        return number

    def __truediv__(self, other: object) -> object:
        return self._real_arithmetic(operator.truediv, other)

    def __rtruediv__(self, other: object) -> object:
        return self._real_arithmetic(operator.truediv, other, swap=True)

    def __rpow__(self, other: object) -> object:
        return self._real_arithmetic(operator.pow, other, swap=True)

    def __bool__(self) -> bool:
        return not self._answer("eq", 0)

    def __lt__(self, other: object) -> bool:
        return self._at_most(other, math.ceil, -1)

    def __le__(self, other: object) -> bool:
        return self._at_most(other, math.floor, 0)

    def __gt__(self, other: object) -> bool:
        return not self._at_most(other, math.floor, 0)

    def __ge__(self, other: object) -> bool:
        return not self._at_most(other, math.ceil, -1)

    def _answer(self, relation: str, other: Dim) -> bool:
        return self._reader().answer(relation, self, other)  # type: ignore[arg-type]

    def _at_most(self, other: object, whole: Callable[[Real], int], shift: int) -> bool:
        """Whether this size is at most whole(other) + shift: every order among sizes and numbers is one."""
        if isinstance(other, Readable):
            return self._answer("le", other + shift)  # type: ignore[operator]
        if not isinstance(other, _REAL):
            raise ShapeError(f"the size {self} cannot be compared with {other!r}, which is not a number")
        if not math.isfinite(other):
            return bool(other > 0)
        return self._answer("le", whole(other) + shift)


def equals(size: Expr, other: object, reader: SizeReader) -> bool:
    """The answer to size == other in a traced function."""
    if isinstance(other, Readable):
        return reader.answer("eq", size, other)  # type: ignore[arg-type]
    if not isinstance(other, _REAL) or not math.isfinite(other):
        return False
    return bool(int(other) == other) and reader.answer("eq", size, int(other))


def is_size(d: Dim, number: int) -> bool:
    """Whether a size is a number, asked by an op whose meaning depends on it, such as `squeeze`: of the sizes
    of the call while a function is traced and they decide it, else as far as it is known.

    >>> is_size(1, 1), is_size(2, 1)
    (True, False)
    """
    reader = READER.get()
    if reader is None or not isinstance(d, Readable) or not reader.knows(d):
        return d == number
    return reader.answer("eq", d, number)


_REAL = (int, float, np.integer, np.floating)
COMPARABLE = (*_REAL, Readable)
_EXACT: dict[str, Callable[..., object]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "negative": operator.neg,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
}
