"""Index expressions as sums: coefficient times axis, plus what does not vary."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.kernel.scalar import LOADS, Scalar, const


def affine(index: Scalar, rank: int) -> tuple[list[Scalar | int], Scalar] | None:
    """index as sum of coefficient * axis + rest; coefficients are ints or size expressions; else None."""
    zero: list[Scalar | int] = [0] * rank
    if index.prim == "axis":
        one = list(zero)
        one[index.data] = 1
        return one, const(0)
    if not any(e.prim == "axis" or e.prim in LOADS or e.prim == "acc" for e in index.walk()):
        return zero, index
    if index.prim in ("add", "sub"):
        left, right = affine(index.args[0], rank), affine(index.args[1], rank)
        if left is None or right is None:
            return None
        sign = 1 if index.prim == "add" else -1
        steps = [_plus(x, _times(y, sign)) for x, y in zip(left[0], right[0], strict=True)]
        return steps, _scalar(_plus(left[1], _times(right[1], sign)))
    if index.prim == "mul":
        for varying, factor in (index.args, index.args[::-1]):
            if not any(e.prim == "axis" or e.prim in LOADS or e.prim == "acc" for e in factor.walk()):
                part = affine(varying, rank)
                if part is not None:
                    k: Scalar | int = factor.data if factor.prim == "const" else factor
                    return [_times(c, k) for c in part[0]], _scalar(_times(part[1], k))
    return None


def _scalar(x: Scalar | int) -> Scalar:
    return x if isinstance(x, Scalar) else const(x)


def _plus(x: Scalar | int, y: Scalar | int) -> Scalar | int:
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    if isinstance(x, int) and x == 0:
        return y
    if isinstance(y, int) and y == 0:
        return x
    return _fold(_scalar(x) + _scalar(y))


def _times(x: Scalar | int, y: Scalar | int) -> Scalar | int:
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    if (isinstance(x, int) and x == 0) or (isinstance(y, int) and y == 0):
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
