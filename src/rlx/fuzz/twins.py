"""Eager runs, in which functions that promise to be NumPy's are compared with NumPy's own."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from rlx import ops
from rlx.errors import ShapeError
from rlx.fuzz.programs.program import PROGRAM, Program
from rlx.ir.dtype import ALL_DTYPES, dtype
from rlx.ir.graph import Node

Given: TypeAlias = Any  # what a call takes: arrays, numbers, names
Function: TypeAlias = Callable[..., Given]
_PROMISE = re.compile(r"as numpy\.([\w.]*\w)")
_DTYPE = re.compile(rf"'({'|'.join(d.name for d in ALL_DTYPES)})'")
COMPARED = ("f", "d", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "?")
"""Dtypes that NumPy itself has and accumulates as RLX does."""
ROUGHLY = 1e-3  # NumPy sums in another order; this oracle is about meaning, the table about rounding


class TwinError(AssertionError):
    """A function gives something else than its namesake of NumPy."""


class Twins:
    """`rlx.ops` as a program sees it: a call with arrays is compared with NumPy's."""

    def __getattr__(self, name: str) -> Function:
        function = getattr(ops, name)
        promise = _PROMISE.search(getattr(function, "__doc__", None) or "")
        twin: Any = np if promise else None
        for part in promise[1].split(".") if promise else ():
            twin = getattr(twin, part, None)
        return function if twin is None else _compared(name, function, twin)


def _compared(name: str, function: Function, twin: Function) -> Function:
    def both(*args: Given, **options: Given) -> Given:
        out = function(*args, **options)
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        if isinstance(out, np.ndarray) and len(arrays) == 1 and arrays[0].dtype.char in COMPARED:
            try:
                compare(name, out, twin, args, options)
            except TwinError:
                if not _order_decides(name, function, twin, args, options):
                    raise
        return out

    return both


def _order_decides(
    name: str, function: Function, twin: Function, args: tuple[Given, ...], options: dict[str, Given]
) -> bool:
    """Whether a difference is that of the order in which f32 overflows: f64 has room, and shows none."""
    if "axis" not in inspect.signature(function).parameters:
        return False
    wide = tuple(a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in args)
    if args[0].dtype != np.float32 or not np.isfinite(args[0]).all():
        return False
    try:
        compare(name, function(*wide, **options), twin, wide, options)
    except TwinError:
        return False
    return True


def compare(
    name: str, out: np.ndarray, twin: Function, args: tuple[Given, ...], options: dict[str, Given]
) -> None:
    """Raise TwinError if NumPy gives another dtype, shape or, roughly, other values."""
    try:
        with np.errstate(all="ignore"):
            want = np.asarray(twin(*args, **options))
    except (TypeError, ValueError, IndexError):  # NumPy's has other options, or refuses the case
        return
    if out.dtype != want.dtype or out.shape != want.shape:
        raise TwinError(f"{name}: {out.dtype}{list(out.shape)}, NumPy gives {want.dtype}{list(want.shape)}")
    finite = np.isfinite(want)
    scale = ROUGHLY * (1 + np.abs(want[finite]).max(initial=0)) if want.dtype.kind == "f" else 0
    if want.dtype.kind in "f" and not np.array_equal(np.isfinite(out), finite):
        raise TwinError(f"{name}: what is finite differs from NumPy's")
    off = np.abs(out[finite].astype(np.float64) - want[finite].astype(np.float64))
    if (off > scale).any():
        raise TwinError(f"{name}: off by {off.max()} from NumPy's")


def is_numpys(program: Program) -> bool:
    """Whether NumPy itself has every dtype: operators between other arrays are those of another package."""
    told = {x.dtype for x in program.inputs} | {w for s in program.steps for w in _DTYPE.findall(s.text)}
    return all(dtype(name).np.isbuiltin == 1 for name in told)


def eager(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The program called with arrays: each op by its reference, at once."""
    try:
        with np.errstate(all="ignore"):
            out = program.function(ops=Twins())(*arrays)
    except (IndexError, ValueError) as e:
        if traceback.extract_tb(e.__traceback__)[-1].filename == PROGRAM:  # x[0] of nothing: NumPy refuses it
            raise ShapeError(str(e)) from e
        raise
    assert not any(isinstance(v, Node) for v in out)
    return [np.asarray(v) for v in out]
