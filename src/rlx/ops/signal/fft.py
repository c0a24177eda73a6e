"""Fourier transforms with NumPy's semantics on complex tensors, and ONNX's on pairs of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, boolean, dim, integer, one_of, optional
from rlx.ir.dim import Dim, known_eq
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.shape import broadcast_to, concat, reshape, slice_axis, transpose
from rlx.ops.math.complex import complex_of, imag, make_complex, real, real_of
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import normal_axis, op_call, shape_of
from rlx.ops.signal.fft_split import check_parts, fft_split, half_bins, irfft_split, rfft_split


@of_one
def resized(x: Operand, axis: int, n: Dim) -> Tensor:
    """An axis cut or filled with zeros at its end to n elements."""
    d = shape_of(x)[axis]
    if known_eq(d, n) is True:
        return x
    padding = tuple((0, n - d if i == axis else 0) for i in range(len(shape_of(x))))
    return op_call("pad", x, padding=padding)


def _to_last(x: Node, axis: int) -> Node:
    made: Node = transpose(x, (*(i for i in range(x.rank) if i != axis), axis))
    return x if axis == x.rank - 1 else made


def _from_last(x: Node, axis: int) -> Node:
    last = x.rank - 1
    made: Node = x if axis == last else transpose(x, (*range(axis), last, *range(axis, last)))
    return made


def _factor(norm: str, n: Dim, inverse: bool, like: Node) -> Tensor:
    """What the unscaled transform is multiplied by; None for 1."""
    if norm == ("forward" if inverse else "backward"):
        return None
    if isinstance(n, int):
        return 1.0 / (n**0.5 if norm == "ortho" else n)
    size = dim_value(n, like.dtype)
    return op_call("rsqrt", size) if norm == "ortho" else 1.0 / size


def _scaled(parts: Sequence[Node], factor: Tensor) -> list[Node]:
    return list(parts) if factor is None else [p * factor for p in parts]


NORMS = ("backward", "ortho", "forward")


class _Transform(Op):
    """Base of the four: attributes n (elements transformed), axis, norm."""

    level = Level.HIR
    arity = 1
    attrs = {
        "n": Attr(optional(dim), None),
        "axis": Attr(integer, -1),
        "norm": Attr(one_of(*NORMS), "backward"),
    }
    numpy: Callable[..., np.ndarray]
    complex_in = True  # whether a complex operand is accepted
    real_in = True
    real_out = False

    def length(self, d: Dim, n: Dim | None) -> Dim:
        """Elements of the time axis."""
        return d if n is None else n

    def bins(self, n: Dim) -> Dim:
        """Elements of the result."""
        return n

    def infer(self, x: TensorType, *, n: Dim | None, axis: int, norm: str) -> TensorType:
        allowed = {"f32": self.real_in, "f64": self.real_in, "c64": self.complex_in, "c128": self.complex_in}
        if not allowed.get(x.dtype.name, False):
            listed = ", ".join(k for k, v in allowed.items() if v)
            raise DTypeError(f"{self.name}: operand {x} is not one of {listed}; cast it")
        axis = normal_axis(self.name, axis, x.rank)
        count = self.length(x.shape[axis], n)
        if isinstance(count, int) and count < 1:
            raise ShapeError(f"{self.name}: axis {axis} of {x} has no elements to transform")
        own = x.dtype if x.dtype.is_complex else complex_of(x.dtype)
        shape = list(x.shape)
        shape[axis] = self.bins(count)
        return TensorType(real_of(own) if self.real_out else own, tuple(shape))

    def ref(self, x: np.ndarray, *, n: int | None, axis: int, norm: str) -> np.ndarray:
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        count = self.length(x.shape[axis], n)
        made = type(self).numpy(x.astype(wide), n=count, axis=axis, norm=norm)
        narrow = x.dtype in (np.float32, np.complex64)
        kinds = (np.float32, np.float64) if self.real_out else (np.complex64, np.complex128)
        return np.asarray(made.astype(kinds[0] if narrow else kinds[1]))

    def samples(self) -> list[Sample]:
        kinds = ["c64"] * self.complex_in + ["f32"] * self.real_in
        out = []
        for kind in kinds:
            out += [
                Sample((Arg(f"{kind}[8]"),), {}),
                Sample((Arg(f"{kind}[2,5,3]"),), {"axis": 1}),
                Sample((Arg(f"{kind}[2,5]"),), {"n": 4, "norm": "ortho"}),
                Sample((Arg(f"{kind}[5,2]"),), {"n": 7, "axis": 0, "norm": "forward"}),
                Sample((Arg(f"{kind}[3]"),), {"n": 1}),
                Sample((Arg(f"{kind}[0,6]"),), {}, grad=False),
                Sample((Arg(f"{kind}[n,m]"),), {"norm": "ortho"}, grad=False),
                Sample((Arg(f"{kind}[n,m]"),), {"axis": 0, "norm": "forward"}, grad=False),
            ]
        return out


class _Complex(_Transform):
    sign = -1

    def expand(self, x: Node, *, n: Dim | None, axis: int, norm: str) -> Node:
        axis = axis % x.rank
        count = self.length(x.shape[axis], n)
        x = _to_last(resized(x, axis, count), axis)
        re = real(x)
        im = imag(x)
        parts = _scaled(fft_split(re, im, sign=self.sign), _factor(norm, count, self.sign > 0, re))
        return _from_last(make_complex(*parts), axis)


@declare
class _fft(_Complex):
    """The discrete Fourier transform along an axis."""

    name = "fft"
    numpy = staticmethod(np.fft.fft)


@declare
class _ifft(_Complex):
    """The inverse of `fft`."""

    name = "ifft"
    numpy = staticmethod(np.fft.ifft)
    sign = 1


@declare
class _rfft(_Transform):
    """Coefficients 0 .. n // 2 of a real tensor along an axis."""

    name = "rfft"
    numpy = staticmethod(np.fft.rfft)
    complex_in = False

    def bins(self, n: Dim) -> Dim:
        return half_bins(n)

    def expand(self, x: Node, *, n: Dim | None, axis: int, norm: str) -> Node:
        axis = axis % x.rank
        count = self.length(x.shape[axis], n)
        x = _to_last(resized(x, axis, count), axis)
        parts = _scaled(rfft_split(x), _factor(norm, count, False, x))
        return _from_last(make_complex(*parts), axis)


@declare
class _irfft(_Transform):
    """The inverse of `rfft`: n real elements (2 * (m - 1) by default) from m coefficients."""

    name = "irfft"
    numpy = staticmethod(np.fft.irfft)
    real_in = False
    real_out = True

    def length(self, d: Dim, n: Dim | None) -> Dim:
        return 2 * (d - 1) if n is None else n

    def expand(self, x: Node, *, n: Dim | None, axis: int, norm: str) -> Node:
        axis = axis % x.rank
        count = self.length(x.shape[axis], n)
        x = _to_last(resized(x, axis, half_bins(count)), axis)
        out = irfft_split(real(x), imag(x), n=count)
        return _from_last(_scaled([out], _factor(norm, count, True, out))[0], axis)


def _call(op: type[Op], x: Operand, n: Dim | None, axis: int, norm: str | None) -> Tensor:
    return op(x, n=n, axis=normal_axis(op.name, axis, len(shape_of(x))), norm=norm or "backward")


@of_one
def fft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The discrete Fourier transform along an axis, as numpy.fft.fft (f32 gives c64).

    >>> fft(np.array([1.0, 0.0, 0.0, 0.0]))
    array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j])
    """
    return _call(_fft, x, n, axis, norm)


@of_one
def ifft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of `fft`, as numpy.fft.ifft.

    >>> ifft(np.array([4.0, 0.0, 0.0, 0.0]))
    array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j])
    """
    return _call(_ifft, x, n, axis, norm)


@of_one
def rfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """Coefficients 0 .. n // 2 of a real x, as numpy.fft.rfft.

    >>> rfft(np.array([1.0, 0.0, 0.0, 0.0]))
    array([1.+0.j, 1.+0.j, 1.+0.j])
    """
    return _call(_rfft, x, n, axis, norm)


@of_one
def irfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The real x that `rfft` gave these coefficients of, as numpy.fft.irfft.

    >>> irfft(np.array([4.0 + 0j, 0.0, 0.0]))
    array([1., 1., 1., 1.])
    """
    return _call(_irfft, x, n, axis, norm)


@declare
class _dft(Op):
    """ONNX DFT: the last axis holds 1 (real) or 2 (real, imaginary) parts, as does that of the result."""

    name = "dft"
    level = Level.HIR
    arity = 1
    attrs = {
        "axis": Attr(integer),
        "n": Attr(optional(dim), None),
        "inverse": Attr(boolean, False),
        "onesided": Attr(boolean, False),
    }

    def infer(self, x: TensorType, *, axis: int, n: Dim | None, inverse: bool, onesided: bool) -> TensorType:
        check_parts(self.name, (x,))
        if x.rank < 2 or x.shape[-1] not in (1, 2) or not 0 <= axis < x.rank - 1:
            raise ShapeError(
                f"dft: the last axis of {x} must hold 1 or 2 parts, and axis {axis} come before it"
            )
        if onesided and not inverse and x.shape[-1] != 1:
            raise ShapeError(f"dft: one side is enough only for a real operand, not {x}")
        d = x.shape[axis]
        shape = [*x.shape[:-1], 1 if onesided and inverse else 2]
        count = _dft_length(d, n, inverse, onesided)
        require_at_least(count, 1, f"dft: axis {axis} of {x} has no elements to transform")
        shape[axis] = half_bins(count) if onesided and not inverse else count
        return x.with_shape(tuple(shape))

    def ref(self, x: np.ndarray, *, axis: int, n: int | None, inverse: bool, onesided: bool) -> np.ndarray:
        count = int(_dft_length(x.shape[axis], n, inverse, onesided))
        wide = x.astype(np.float64)
        z = wide[..., 0] + (1j * wide[..., 1] if x.shape[-1] == 2 else 0)
        if inverse and onesided:
            return np.asarray(np.fft.irfft(z, count, axis=axis)[..., None].astype(x.dtype))
        out = (np.fft.ifft if inverse else np.fft.fft)(z, count, axis=axis)
        if onesided:
            out = np.take(out, range(count // 2 + 1), axis=axis)
        return np.stack([out.real, out.imag], -1).astype(x.dtype)

    def expand(self, x: Node, *, axis: int, n: Dim | None, inverse: bool, onesided: bool) -> Node:
        count = _dft_length(x.shape[axis], n, inverse, onesided)
        x = resized(x, axis, half_bins(count) if onesided and inverse else count)
        kept = x.rank - 1

        def part(i: int) -> Node:
            return _to_last(reshape(slice_axis(x, kept, i, 1), x.shape[:-1]), axis)

        re = part(0)
        zero = x.graph.constant(np.zeros((), x.dtype.np))
        im = part(1) if x.shape[-1] == 2 else broadcast_to(zero, re.shape)
        factor = _factor("backward", count, inverse, re)
        made: Sequence[Node]
        if onesided and inverse:
            made = (irfft_split(re, im, n=count),)
        elif onesided:
            made = rfft_split(re)
        else:
            made = fft_split(re, im, sign=1 if inverse else -1)
        columns = [_from_last(p, axis) for p in _scaled(made, factor)]
        out: Node = concat([reshape(p, (*p.shape, 1)) for p in columns], kept)
        return out

    def samples(self) -> list[Sample]:
        def one(type_: str, grad: bool = True, **attrs: object) -> Sample:
            return Sample((Arg(type_),), attrs, grad=grad)

        return [
            one("f32[1,8,1]", axis=1),
            one("f32[2,5,2]", axis=1, n=7),
            one("f32[5,2,2]", axis=0, inverse=True),
            one("f32[1,6,1]", axis=1, onesided=True),
            one("f32[1,5,1]", axis=1, onesided=True, n=3),
            one("f32[1,4,2]", axis=1, onesided=True, inverse=True),
            one("f32[1,4,2]", axis=1, onesided=True, inverse=True, n=7),
            one("f32[n,m,1]", False, axis=1, onesided=True),
            one("f32[0,4,1]", False, axis=1),
        ]


def _dft_length(d: Dim, n: Dim | None, inverse: bool, onesided: bool) -> Dim:
    return n if n is not None else 2 * (d - 1) if onesided and inverse else d


@of_one
def dft(
    x: Operand, axis: int = -2, n: Dim | None = None, inverse: bool = False, onesided: bool = False
) -> Tensor:
    """ONNX DFT of x [.., 1 or 2 parts] along an axis, cut or filled to n elements.

    >>> dft(np.array([[1.0], [0.0]]), axis=0)
    array([[1., 0.],
           [1., 0.]])
    """
    axis = normal_axis("dft", axis, len(shape_of(x)))
    return _dft(x, axis=axis, n=n, inverse=inverse, onesided=onesided)
