"""Fourier transforms of real and imaginary parts held as two real tensors: the primitives under all others.

They work along the last axis and without scaling. What follows a transform (power, filters) is then real
arithmetic, which fuses; complex tensors exist only at the surface.
With X[k] = sum over t of x[t] * exp(sign * 2 pi i k t / n):

    fft_split(re, im)    all n coefficients; its adjoint is itself with the other sign
    rfft_split(x)        coefficients 0 .. n // 2 of a real x, sign -1
    irfft_split(re, im)  the real sequence of n elements that has those coefficients, times n, sign +1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, dim, integer
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Arg, MultiOp, Op, Sample, declare
from rlx.ir.types import TensorType, TupleType
from rlx.kernel.form import Form, Template
from rlx.ops.array.shape import broadcast_to
from rlx.ops.math.elementwise import equal, logical_or, where
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import lift_all, op_call, same_dtype


def transform_cost(n: Dim, rows: Dim) -> Dim:
    """About 5 n log2(n) operations for each row."""
    log = max(n.bit_length(), 1) if isinstance(n, int) else 10
    return rows * n * (5 * log)


def check_parts(name: str, types: Sequence[TensorType]) -> None:
    """Parts are f32 or f64 tensors with an axis to transform."""
    for t in types:
        if t.dtype.name not in ("f32", "f64"):
            raise DTypeError(f"{name}: operand {t} is not f32 or f64; cast it")
        if t.rank < 1:
            raise ShapeError(f"{name}: operand {t} has no axis to transform")
    same_dtype(name, types)


def _rows(t: TensorType) -> Dim:
    total: Dim = 1
    for d in t.shape[:-1]:
        total = total * d
    return total


def or_zeros(parts: Sequence[Node | None], like: Sequence[Node]) -> list[Node]:
    """Gradients of results, zero where none arrived."""
    out = []
    for p, x in zip(parts, like, strict=True):
        zero = x.graph.constant(np.zeros((), x.dtype.np))
        out.append(broadcast_to(zero, x.shape) if p is None else p)
    return out


def _parts(z: np.ndarray, like: Any) -> tuple[np.ndarray, np.ndarray]:
    return z.real.astype(like), z.imag.astype(like)


@declare
class fft_split(MultiOp):
    """All coefficients of a complex sequence given by its parts, along the last axis."""

    name = "fft_split"
    family = "fourier"
    arity = 2
    attrs = {"sign": Attr(integer, -1)}

    def infer(self, re: TensorType, im: TensorType, *, sign: int) -> TupleType:
        check_parts(self.name, (re, im))
        if sign not in (-1, 1):
            raise ShapeError(f"fft_split: sign {sign} is neither -1 nor 1")
        shape = require_shape(re.shape, im.shape, f"fft_split: the parts {re} and {im} differ in shape")
        return TupleType((re.with_shape(shape),) * 2)

    def ref(self, re: np.ndarray, im: np.ndarray, *, sign: int) -> tuple[np.ndarray, np.ndarray]:
        n = re.shape[-1]
        if n == 0:
            return re, im
        z = re.astype(np.float64) + 1j * im.astype(np.float64)
        return _parts(np.fft.fft(z) if sign < 0 else np.fft.ifft(z) * n, re.dtype)

    def vjp(
        self, g: Sequence[Node | None], y: Sequence[Node], re: Node, im: Node, *, sign: int
    ) -> list[Node]:
        return list(fft_split(*or_zeros(g, y), sign=-sign))

    def batch(self, flags: Sequence[bool], *operands: Node, sign: int) -> tuple[Node, Node]:
        re, im = fft_split(*lift_all(flags, operands), sign=sign)
        return re, im

    def lower(self, re: TensorType, im: TensorType, *, sign: int) -> Form:
        config = (("kind", "complex"), ("shape", re.shape), ("sign", sign), ("dtype", re.dtype))
        return Template("fft", config, outputs=2)

    def cost(self, re: TensorType, im: TensorType, *, sign: int) -> Dim:
        return transform_cost(re.shape[-1], _rows(re))

    def samples(self) -> list[Sample]:
        out = [
            Sample((Arg(f"f32[{s}]"), Arg(f"f32[{s}]")), {"sign": sign})
            for s in ("8", "2,5", "1")
            for sign in (-1, 1)
        ]
        out += [
            Sample((Arg("f32[3,17]"), Arg("f32[3,17]")), {}),
            Sample((Arg("f32[0,4]"), Arg("f32[0,4]")), {}),
        ]
        return [*out, Sample((Arg("f32[n,m]"), Arg("f32[n,m]")), {}, grad=False)]


def half_bins(n: Dim) -> Dim:
    """How many coefficients say all about n real elements."""
    return n // 2 + 1


def _interior(m: Dim, n: Dim, like: Node, inside: float) -> Node:
    """`inside` for coefficients that stand for two (k and n - k), 1 for those that stand for themselves."""
    k = op_call("iota", shape=(m,), axis=0)
    alone = logical_or(equal(k, 0), equal(k * 2, dim_value(n)))
    one = like.graph.constant(np.ones((), like.dtype.np))
    made: Node = where(alone, one, inside)
    return made


@declare
class rfft_split(MultiOp):
    """Coefficients 0 .. n // 2 of a real sequence along the last axis, as real and imaginary parts."""

    name = "rfft_split"
    family = "fourier"
    arity = 1

    def infer(self, x: TensorType) -> TupleType:
        check_parts(self.name, (x,))
        if x.shape[-1] == 0:
            raise ShapeError(f"rfft_split: the last axis of {x} is empty")
        return TupleType((x.with_shape((*x.shape[:-1], half_bins(x.shape[-1]))),) * 2)

    def ref(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _parts(np.fft.rfft(x.astype(np.float64)), x.dtype)

    def vjp(self, g: Sequence[Node | None], y: Sequence[Node], x: Node) -> list[Node]:
        n = x.shape[-1]
        weight = _interior(y[0].shape[-1], n, x, 0.5)
        re, im = (p * weight for p in or_zeros(g, y))
        made: Node = irfft_split(re, im, n=n)
        return [made]

    def batch(self, flags: Sequence[bool], x: Node) -> tuple[Node, Node]:
        re, im = rfft_split(x)
        return re, im

    def lower(self, x: TensorType) -> Form:
        config = (("kind", "real"), ("shape", x.shape), ("sign", -1), ("dtype", x.dtype))
        return Template("fft", config, outputs=2)

    def cost(self, x: TensorType) -> Dim:
        return transform_cost(x.shape[-1], _rows(x)) // 2

    def samples(self) -> list[Sample]:
        out = [Sample((Arg(f"f32[{s}]"),)) for s in ("8", "2,5", "1", "2", "3,17", "0,4")]
        return [*out, Sample((Arg("f32[n,m]"),), grad=False)]


@declare
class irfft_split(Op):
    """The real sequence of n elements with given coefficients 0 .. n // 2, times n, along the last axis.

    The imaginary part of coefficient 0, and of n / 2 for an even n, takes no part.
    """

    name = "irfft_split"
    family = "fourier"
    arity = 2
    attrs = {"n": Attr(dim)}

    def infer(self, re: TensorType, im: TensorType, *, n: Dim) -> TensorType:
        check_parts(self.name, (re, im))
        shape = require_shape(re.shape, im.shape, f"irfft_split: the parts {re} and {im} differ in shape")
        require_equal(
            shape[-1],
            half_bins(n),
            f"irfft_split: {re} has {shape[-1]} coefficients, {n} elements have {half_bins(n)}",
        )
        return re.with_shape((*shape[:-1], n))

    def ref(self, re: np.ndarray, im: np.ndarray, *, n: int) -> np.ndarray:
        z = re.astype(np.float64) + 1j * im.astype(np.float64)
        return (np.fft.irfft(z, n) * n).astype(re.dtype)

    def vjp(self, g: Node, y: Node, re: Node, im: Node, *, n: Dim) -> list[Node]:
        weight = _interior(re.shape[-1], n, re, 2.0)
        return [p * weight for p in rfft_split(g)]

    def batch(self, flags: Sequence[bool], *operands: Node, n: Dim) -> Node:
        made: Node = irfft_split(*lift_all(flags, operands), n=n)
        return made

    def lower(self, re: TensorType, im: TensorType, *, n: Dim) -> Form:
        config = (("kind", "to_real"), ("shape", (*re.shape[:-1], n)), ("sign", 1), ("dtype", re.dtype))
        return Template("fft", config)

    def cost(self, re: TensorType, im: TensorType, *, n: Dim) -> Dim:
        return transform_cost(n, _rows(re)) // 2

    def samples(self) -> list[Sample]:
        rows = [("5", 8), ("2,3", 5), ("1", 1), ("2", 2), ("3,9", 17), ("0,3", 4)]
        out = [Sample((Arg(f"f32[{s}]"), Arg(f"f32[{s}]")), {"n": n}) for s, n in rows]
        return [*out, Sample((Arg("f32[m,n]"), Arg("f32[m,n]")), {"n": 4}, grad=False)]
