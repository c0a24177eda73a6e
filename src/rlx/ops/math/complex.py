"""Complex numbers: their parts, their conjugate, and the number of two parts.

Gradients follow the pairing Re(sum(g * dy)): of a function of a complex z the gradient is g * dy/dz where
that exists; of a real loss it is the conjugate of the direction of steepest ascent.
"""

from __future__ import annotations

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.dtype import C64, C128, F32, F64, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.kernel.scalar import primitive
from rlx.ops.math.elementwise import Elementwise, neg
from rlx.ops.rules import is_complex, is_real_float, unbroadcast


def real_of(d: DType, *_: DType) -> DType:
    """The dtype of the parts of a complex dtype."""
    return F64 if d is C128 else F32


def complex_of(d: DType, *_: DType) -> DType:
    """The complex dtype whose parts have a real dtype."""
    if d not in (F32, F64):
        raise DTypeError(f"complex numbers have f32 or f64 parts, not {d}; cast first")
    return C128 if d is F64 else C64


def _joined(re: np.ndarray, im: np.ndarray) -> np.ndarray:
    out = np.empty(np.broadcast_shapes(re.shape, im.shape), np.result_type(re.dtype, np.complex64))
    out.real, out.imag = re, im
    return out


class _Unary(Elementwise):
    """Base of the functions of one complex number."""

    arity = 1
    accepts = staticmethod(is_complex)

    def samples(self) -> list[Sample]:
        shapes = ("c64[]", "c64[1]", "c64[3,17]", "c64[2,0]")
        return [*(Sample((Arg(s),)) for s in shapes), Sample((Arg("c64[n,3]"),), grad=False)]


@declare
class _real(_Unary):
    """The real part."""

    name = "real"
    result = staticmethod(real_of)

    def ref(self, z: np.ndarray) -> np.ndarray:
        return np.real(z)

    def vjp(self, g: Node, y: Node, z: Node) -> list[Node]:
        made: Node = make_complex(g, _zero(g))
        return [made]


@declare
class _imag(_Unary):
    """The imaginary part."""

    name = "imag"
    result = staticmethod(real_of)

    def ref(self, z: np.ndarray) -> np.ndarray:
        return np.imag(z)

    def vjp(self, g: Node, y: Node, z: Node) -> list[Node]:
        made: Node = make_complex(_zero(g), neg(g))
        return [made]


@declare
class _conj(_Unary):
    """The conjugate: the imaginary part changes its sign."""

    name = "conj"
    result = staticmethod(lambda d: d)

    def ref(self, z: np.ndarray) -> np.ndarray:
        return np.asarray(np.conj(z))

    def vjp(self, g: Node, y: Node, z: Node) -> list[Node]:
        made: Node = _conj(g)
        return [made]


@declare
class make_complex(Elementwise):
    """The complex number with these real and imaginary parts; they broadcast."""

    name = "complex"
    arity = 2
    accepts = staticmethod(is_real_float)
    result = staticmethod(complex_of)

    def ref(self, re: np.ndarray, im: np.ndarray) -> np.ndarray:
        return _joined(re, im)

    def vjp(self, g: Node, y: Node, re: Node, im: Node) -> list[Node]:
        return [unbroadcast(_real(g), re), unbroadcast(neg(_imag(g)), im)]

    def samples(self) -> list[Sample]:
        rows = [("f32[]", "f32[]"), ("f32[5]", "f32[5]"), ("f32[2,1,3]", "f32[4,1]"), ("f32[0,3]", "f32[3]")]
        out = [Sample((Arg(a), Arg(b))) for a, b in rows]
        return [*out, Sample((Arg("f32[n,3]"), Arg("f32[n,1]")), grad=False)]


def _zero(g: Node) -> Node:
    return g.graph.constant(np.zeros((), g.dtype.np))


primitive("real", 1, np.real, real_of)
primitive("imag", 1, np.imag, real_of)
primitive("conj", 1, np.conj, lambda d: d)
primitive("complex", 2, _joined, complex_of)


def _is_complex(x: Operand) -> bool:
    return x.dtype.is_complex if isinstance(x, Node) else np.asarray(x).dtype.kind == "c"


def _plain(x: Operand) -> Tensor:
    return x if isinstance(x, Node) else np.asarray(x)


@of_one
def real(x: Operand) -> Tensor:
    """The real part, as numpy.real; a real x is its own.

    >>> real(np.array([1 + 2j]))
    array([1.])
    """
    return _real(x) if _is_complex(x) else _plain(x)


@of_one
def imag(x: Operand) -> Tensor:
    """The imaginary part, as numpy.imag; of a real x it is 0.

    >>> imag(np.array([1 + 2j]))
    array([2.])
    """
    return _imag(x) if _is_complex(x) else _plain(x) * 0


@of_one
def conj(x: Operand) -> Tensor:
    """The complex conjugate, as numpy.conj; a real x is its own.

    >>> conj(np.array([1 + 2j]))
    array([1.-2.j])
    """
    return _conj(x) if _is_complex(x) else _plain(x)
