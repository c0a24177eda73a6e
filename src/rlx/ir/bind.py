"""Bindings: the values of symbols, found by matching declared shapes against actual ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlx.errors import GuardError, InputError
from rlx.ir.dim import Constraint, Dim, Expr, Sym, evaluate, symbols
from rlx.ir.dtype import ParamValue, dtype, plain_array, refuse_lossy
from rlx.ir.types import TensorType


def _name_apart(declared: Sequence[Dim], axis: Dim, name: str, what: str) -> str:
    """What to do where exporters gave two axes of inputs one name."""
    if not what.startswith("input "):
        return ""
    shape = [f"{name} here" if d is axis else d if isinstance(d, int) else str(d) for d in declared]
    return (
        "; if they may differ, give this axis its own name: load an ONNX model with "
        f"shapes={{{what.removeprefix('input ')}: {shape}}}"
    )


def match_shape(declared: Sequence[Dim], actual: Sequence[int], binding: dict[str, int], what: str) -> None:
    """Bind the symbols of a declared shape to an actual one; a contradiction raises InputError."""
    if len(declared) != len(actual):
        raise InputError(
            f"{what} has rank {len(declared)} {_shape(declared)}, got shape {_shape(actual)}; "
            f"reshape it to {len(declared)} axes"
        )
    later: list[tuple[Expr, int]] = []
    for axis, (want, got) in enumerate(zip(declared, actual, strict=True)):
        if isinstance(want, int):
            if want != got:
                raise InputError(
                    f"{what} has shape {_shape(declared)}, got {_shape(actual)}: "
                    f"axis {axis} must be {want}, not {got}"
                )
            continue
        names = symbols(want)
        name = names[0] if len(names) == 1 else ""
        if name and str(want) in (name, f"`{name}`"):
            if binding.setdefault(name, got) != got:
                raise InputError(
                    f"{what} has shape {_shape(declared)}, got {_shape(actual)}: {name} is already "
                    f"{binding[name]} from another axis{_name_apart(declared, want, name, what)}"
                )
        else:
            later.append((want, got))
    for want_expr, got in later:
        unknown = [n for n in symbols(want_expr) if n not in binding]
        if len(unknown) == 1:
            binding[unknown[0]] = _solve(want_expr, unknown[0], got, binding, what)
        elif not unknown and evaluate(want_expr, binding) != got:
            raise InputError(
                f"{what} has shape {_shape(declared)}, got {_shape(actual)}: "
                f"{want_expr} is {evaluate(want_expr, binding)} here, not {got}"
            )


def _solve(expr: Expr, name: str, value: int, binding: Mapping[str, int], what: str) -> int:
    """The smallest size of `name` that makes a monotone expression equal to value."""
    low, high = 0, 1

    def at(n: int) -> int:
        return evaluate(expr, {**binding, name: n})

    while at(high) < value and high < 1 << 40:
        high *= 2
    while low < high:
        mid = (low + high) // 2
        low, high = (mid + 1, high) if at(mid) < value else (low, mid)
    if at(low) != value:
        raise InputError(f"{what}: no size of {name} makes {expr} equal to {value}; use another shape")
    return low


def _shape(shape: Iterable[object]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def size_symbol(declared: TensorType) -> Sym | None:
    """The symbol of a size input: an input of shape (symbol, 0), which has no elements and only says a size.

    >>> from rlx.ir.types import parse_type
    >>> size_symbol(parse_type("i8[n,0]")).name, size_symbol(parse_type("i8[n,1]"))
    ('n', None)
    """
    if declared.rank != 2 or declared.shape[1] != 0 or not isinstance(declared.shape[0], Expr):
        return None
    terms = declared.shape[0].terms
    atoms = [atom for monomial, _ in terms for atom, _ in monomial]
    if (
        len(atoms) != 1
        or not isinstance(atoms[0], Sym)
        or str(declared.shape[0])
        not in (
            atoms[0].name,
            f"`{atoms[0].name}`",
        )
    ):
        return None
    return atoms[0]


def as_given(declared: TensorType, value: object) -> np.ndarray:
    """What a caller gives for an input as an array; a number stands for a size."""
    if isinstance(value, (int, np.integer)) and size_symbol(declared) is not None:
        return np.empty((int(value), 0), declared.dtype.np)
    return plain_array(value, "an input")


def check_array(declared: TensorType, array: ParamValue, binding: dict[str, int], what: str) -> None:
    """An array must have the declared dtype and shape."""
    refuse_lossy(array, what)
    if array.dtype.kind in "OSUMm":
        raise InputError(f"{what} is {declared}, got an array of {array.dtype}; give an array of numbers")
    if dtype(array.dtype) is not declared.dtype:
        raise InputError(
            f"{what} is {declared}, got dtype {dtype(array.dtype)}; "
            f"cast it: array.astype({declared.dtype.np.name!r})"
        )
    match_shape(declared.shape, array.shape, binding, what)


def check_constraints(constraints: Iterable[Constraint], binding: Mapping[str, int]) -> None:
    """Every guard whose symbols are known must hold."""
    for c in constraints:
        if not holds(c, binding):
            at = ", ".join(f"{n}={binding[n]}" for n in c.symbols)
            raise GuardError(
                f"the program assumed {c.describe()}, which does not hold for {at}; use other sizes", c.where
            )


def holds(c: Constraint, binding: Mapping[str, int]) -> bool:
    """Whether an assumption holds, as far as sizes are known."""
    return not all(n in binding for n in c.symbols) or c.check(binding)
