"""What a caller gives for an input: checked, its symbols bound, in contiguous memory."""

from __future__ import annotations

import numpy as np

from rlx.errors import GuardError, InputError
from rlx.ir.bind import check_array, size_symbol
from rlx.ir.dim import Expr, Sym, symbols
from rlx.ir.dtype import plain_array, refuse_lossy
from rlx.ir.graph import Node


class InputEntry:
    """Takes one input: checks it, binds its symbols, gives contiguous memory; quick where all is right."""

    __slots__ = ("_dims", "_dtype", "_node", "_rank", "_static")

    def __init__(self, node: Node) -> None:
        self._node, self._dtype, self._rank = node, node.dtype.np, node.rank
        self._static = node.tensor.is_static
        names = [symbols(d)[0] if isinstance(d, Expr) and str(d) in symbols(d) else None for d in node.shape]
        self._dims = list(zip(node.shape, names, strict=True))

    def __call__(self, value: object, binding: dict[str, int]) -> np.ndarray:
        array = value if type(value) is np.ndarray else self._array(value)
        if (array.dtype is not self._dtype and array.dtype != self._dtype) or not self._matches(
            array.shape, binding
        ):
            check_array(self._node.tensor, array, binding, f"input {self._node.attrs['name']!r}")
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def _array(self, value: object) -> np.ndarray:
        refuse_lossy(value, f"input {self._node.attrs['name']!r}")
        try:
            return np.asarray(value)
        except ValueError:  # rows of different lengths
            what = f"input {self._node.attrs['name']!r} is {self._node.tensor}"
            raise InputError(
                f"{what}, got a {type(value).__name__} whose rows differ in length; give an array"
            ) from None

    def _matches(self, shape: tuple[int, ...], binding: dict[str, int]) -> bool:
        if self._static or len(shape) != self._rank:
            return shape == self._node.shape
        for n, (d, name) in zip(shape, self._dims, strict=True):
            if name is not None:
                if binding.setdefault(name, n) != n:
                    return False
            elif d != n:
                return False
        return True


class SizeEntry:
    """Takes a size input: a number, or an array without elements of that length."""

    __slots__ = ("_empty", "_high", "_low", "_name", "_symbol")

    def __init__(self, node: Node, symbol: Sym) -> None:
        self._symbol, self._low, self._high = symbol.name, symbol.min, symbol.max
        self._empty = np.empty((0, 0), node.dtype.np)
        self._name = node.attrs["name"]

    def __call__(self, value: object, binding: dict[str, int]) -> np.ndarray:
        if isinstance(value, (int, np.integer)):
            n = int(value)
        else:
            shape = plain_array(value, f"size {self._name!r}").shape
            if len(shape) != 2 or shape[1] != 0:
                raise GuardError(f"size {self._name!r} is a number, got an array of shape {shape}")
            n = shape[0]
        if n < self._low or (self._high is not None and n > self._high):
            limit = "" if self._high is None else f" to {self._high}"
            raise GuardError(f"size {self._name!r} is {n}; it must be {self._low}{limit}")
        if binding.setdefault(self._symbol, n) != n:
            raise GuardError(
                f"size {self._name!r} is {n}, but {self._symbol} is {binding[self._symbol]} already"
            )
        return self._empty


def entry_of(node: Node) -> InputEntry | SizeEntry:
    """What takes the values of an input."""
    symbol = size_symbol(node.tensor)
    return InputEntry(node) if symbol is None else SizeEntry(node, symbol)
