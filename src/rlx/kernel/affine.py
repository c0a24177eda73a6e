"""Index expressions as sums: coefficient times axis, plus what does not vary."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.kernel.scalar import Scalar, const


def affine(index: Scalar, rank: int) -> tuple[list[Scalar | int], Scalar] | None:
    """index as sum of coefficient * axis + rest; coefficients are ints or size expressions; else None."""
    parts = _affine(index, rank)
    return None if parts is None else (parts[0], _scalar(parts[1]))


def _affine(index: Scalar, rank: int) -> tuple[list[Scalar | int], Scalar | int] | None:
    """The same, with a known rest as an int."""
    if index.prim == "axis":
        steps: list[Scalar | int] = [0] * rank
        steps[index.data] = 1
        return steps, 0
    if index.is_uniform:
        return [0] * rank, _fold(index)
    if index.prim == "add":
        left, right = _affine(index.args[0], rank), _affine(index.args[1], rank)
        if left is None or right is None:
            return None
        return list(map(_plus, left[0], right[0])), _plus(left[1], right[1])
    if index.prim == "sub":
        left, right = _affine(index.args[0], rank), _affine(index.args[1], rank)
        if left is None or right is None:
            return None
        return list(map(_minus, left[0], right[0])), _minus(left[1], right[1])
    if index.prim == "mul":
        for varying, factor in (index.args, index.args[::-1]):
            part = _affine(varying, rank) if factor.is_uniform else None
            if part is not None:
                k = _fold(factor)
                return [_times(c, k) for c in part[0]], _times(part[1], k)
    return None


def _scalar(x: Scalar | int) -> Scalar:
    return x if isinstance(x, Scalar) else const(x)


def _plus(x: Scalar | int, y: Scalar | int) -> Scalar | int:
    if x.__class__ is int:
        if y.__class__ is int:
            return x + y
        if x == 0:
            return y
    elif y.__class__ is int and y == 0:
        return x
    return _fold(_scalar(x) + _scalar(y))


def _minus(x: Scalar | int, y: Scalar | int) -> Scalar | int:
    if x.__class__ is int and y.__class__ is int:
        return x - y
    return _plus(x, _times(y, -1))


def _times(x: Scalar | int, y: Scalar | int) -> Scalar | int:
    if x.__class__ is int:
        if y.__class__ is int:
            return x * y
        if x == 0:
            return 0
    elif y.__class__ is int and y == 0:
        return 0
    return _fold(_scalar(x) * _scalar(y))


def _fold(s: Scalar) -> Scalar | int:
    return s.data if s.prim == "const" else s


def to_dim(s: Scalar | int) -> Dim | None:
    """A size expression (const, size, + - *) as a dim; None where it holds anything else."""
    if isinstance(s, int):
        return s
    if s.prim in ("const", "size"):
        value: Dim = s.data
        return value
    if s.prim in ("add", "sub", "mul") and len(s.args) == 2:
        x, y = to_dim(s.args[0]), to_dim(s.args[1])
        if x is None or y is None:
            return None
        return x + y if s.prim == "add" else x - y if s.prim == "sub" else x * y
    return None
