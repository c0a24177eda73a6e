"""Arguments of a function to be traced: classified, and refused in terms of the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.errors import RlxError, TypeMismatchError
from rlx.frontend.trace import as_array
from rlx.ir.tree import Nest
from rlx.ir.weak import NUMBERS, carried


def need_function(function: object, caller: str) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise TypeMismatchError(f"{caller} takes a function, got a value of type {type(function).__name__}")


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function; some of Python's own say nothing about them and take any arguments.

    >>> [p.name for p in parameters_of(lambda x, scale: x)], [str(p) for p in parameters_of(max)]
    (['x', 'scale'], ['*args'])
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def place_of(function: Callable[..., object]) -> str:
    """Name and line of a function, that of the user where it is wrapped."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", "a function")
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else name


def check_call(
    function: Callable[..., object], args: Sequence[Nest], kwargs: Mapping[str, Nest], caller: str = ""
) -> None:
    """Refuse a call with other arguments than the function has, as Python would.

    >>> check_call(lambda x, y: x, [1], {})
    Traceback (most recent call last):
    rlx.errors.TypeMismatchError: <lambda> (...) takes (x, y): missing a required argument: 'y'...
    """
    parameters = parameters_of(function)
    try:
        inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as e:
        takes = ", ".join(str(p) for p in parameters)
        raise TypeMismatchError(f"{caller}{place_of(function)} takes ({takes}): {e}") from None


def as_arrays(leaves: Sequence[object], paths: Callable[[], Sequence[str]]) -> list[np.ndarray]:
    """The leaves of the arguments as arrays; `paths` says how the user writes each of them."""
    try:
        return [_as_argument(leaf) for leaf in leaves]
    except (RlxError, ValueError, OverflowError, TypeError) as e:
        for leaf, path in zip(leaves, paths(), strict=True):
            if not _is_array(leaf):
                raise TypeMismatchError(_refusal(leaf, path, e)) from None
        raise


def _as_argument(leaf: object) -> np.ndarray:
    """An argument as an array; numbers keep all their digits until their dtype is known."""
    return np.asarray(leaf, carried(leaf).np) if isinstance(leaf, NUMBERS) else as_array(leaf)


def _is_array(leaf: object) -> bool:
    try:
        _as_argument(leaf)
    except (RlxError, ValueError, OverflowError, TypeError):
        return False
    return True


def _refusal(leaf: object, path: str, error: Exception) -> str:
    """Why an argument is none, and what to do."""
    what = f"argument {path.removeprefix('argument ')} is "
    if isinstance(leaf, int):
        return f"{what}{leaf}, which does not fit 64 bits; give a float or a smaller number"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OUSMm":
        told = error.message if isinstance(error, RlxError) else str(error)
        return f"{what}an array of {leaf.dtype}: {told}"
    kind = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"of type {type(leaf).__name__}"
    return f"{what}{kind}; give arrays and numbers, and name other arguments in static="
