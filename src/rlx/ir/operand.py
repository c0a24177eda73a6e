"""What ops take and give, for type checkers: nodes, arrays, and what becomes an array.

`of_one` marks functions whose result is a node if their first operand is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlx.ir.dim import Expr
from rlx.ir.dtype import DType
from rlx.ir.node import Node

ArrayLike: TypeAlias = np.ndarray | np.generic | complex | Expr | list[Any] | tuple[Any, ...]
"""What becomes a constant: an array, a number, a size, or a sequence of them."""

Operand: TypeAlias = Node | ArrayLike
"""What an op takes."""

Tensor: TypeAlias = Any
"""What an op gives: a node of the graph being built, else an array. Types do not show which."""

Nodes: TypeAlias = Node | tuple[Node, ...]
"""What rules of an op give: a node, or one for each result."""

Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, ...]
"""What the reference of an op gives: an array, or one for each result."""

DTypeLike: TypeAlias = DType | str | np.dtype | type
"""What names a dtype: "f32", a NumPy dtype or scalar type, bool, int, float, complex."""

DimLike: TypeAlias = int | str | Expr
"""What becomes a size: a number, the name of a symbol, an expression."""

Axes: TypeAlias = int | tuple[int, ...] | list[int]
"""One axis or several."""

Sizes: TypeAlias = DimLike | tuple[DimLike, ...] | list[DimLike]
"""One size or several: numbers, names of symbols, expressions."""

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec, Protocol, overload

    P = ParamSpec("P")

    class OfOne(Protocol[P]):
        """A function of an operand, with one result."""

        @overload
        def __call__(self, x: Node, /, *args: P.args, **kwargs: P.kwargs) -> Node: ...
        @overload
        def __call__(self, x: ArrayLike, /, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...

    class OfTwo(Protocol[P]):
        """A function of two operands, with one result."""

        @overload
        def __call__(self, x: Node, y: Operand, /, *args: P.args, **kwargs: P.kwargs) -> Node: ...
        @overload
        def __call__(self, x: ArrayLike, y: Node, /, *args: P.args, **kwargs: P.kwargs) -> Node: ...
        @overload
        def __call__(self, x: ArrayLike, y: ArrayLike, /, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...

    class OfMany(Protocol[P]):
        """A function of an operand, with several results."""

        @overload
        def __call__(self, x: Node, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Node, ...]: ...
        @overload
        def __call__(self, x: ArrayLike, /, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...

    def of_one(f: Callable[Concatenate[Operand, P], Tensor]) -> OfOne[P]: ...
    def of_two(f: Callable[Concatenate[Operand, Operand, P], Tensor]) -> OfTwo[P]: ...
    def of_many(f: Callable[Concatenate[Operand, P], Tensor]) -> OfMany[P]: ...

else:

    def of_one(f):
        """The function itself: for type checkers its result is a node if its first operand is one."""
        return f

    def of_two(f):
        """The function itself: for type checkers its result is a node if one of its two operands is."""
        return f

    def of_many(f):
        """The function itself: for type checkers its results are nodes if its first operand is one."""
        return f
