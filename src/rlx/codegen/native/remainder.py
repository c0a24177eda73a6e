"""The exact remainder of floats as code of our own: LLVM's `frem` would be a call to libm."""

from __future__ import annotations

from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.irtypes import Value, bits, constant
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    Word,
    bitcast,
    call,
    external,
    extract,
    i1,
    i32,
    i64,
    insert,
    leave,
    lshr,
    select,
    trunc,
    uge,
    ugt,
    ult,
    umax,
    umin,
    urem,
    zext,
)

_MANTISSA = {"float": 23, "double": 52}
_INTEGER = {"float": i32, "double": i64}
_leading_zeros = external("llvm.ctlz.i64", i64)


@inline
def fmod(f: Function, x: Value, y: Value) -> Value:
    """x - y * trunc(x / y) without any rounding, with the sign of x, as C's fmod; one lane after another."""
    name, out = _function(f.module, x.element), constant(x.type, 0.0)
    for lane in range(x.width):
        rest = call(name, extract(x, lane), extract(y, lane), returns=x.element)
        out = insert(out, rest, lane)
    return out


def _function(module: Module, element: str) -> str:
    """A function (x, y) -> remainder of scalars, written once per module."""
    name = f"rlx_fmod_{element}"
    if not module.defines(name):
        params = [(element, "x"), (element, "y")]
        f = module.function(name, params, internal=True, noinline=True, returns=element)
        write(f, _remainder, *f.args)
    return name


@inline
def _remainder(x: Word, y: Word) -> None:
    """Finite numbers are M 2**E with whole M. The rest of Mx 2**(Ex - Ey) divided by My is found as in long
    division: as many bits at a time as a word has room for beside the rest so far.
    """
    mantissa, integer = _MANTISSA[x.type], _INTEGER[x.type]
    sign = 1 << (bits(x.type) - 1)
    infinity = sign - (1 << mantissa)
    word_x, word_y = (zext(bitcast(v, integer), i64) for v in (x, y))
    size_x, size_y = (word & (sign - 1) for word in (word_x, word_y))

    def parts(size: i64) -> tuple[i64, i64]:
        """Whole number and exponent; denormals have the exponent of the smallest normal numbers."""
        exponent, fraction = lshr(size, mantissa), size & ((1 << mantissa) - 1)
        whole = select(exponent != 0, fraction | 1 << mantissa, fraction)
        return whole, umax(exponent, 1)

    if (size_y == 0) | uge(size_x, infinity) | ugt(size_y, infinity):
        product = x * y  # of a NaN its bits, else a new one
        leave(product / product)
    if ult(size_x, size_y):
        leave(x)
    (whole_x, exponent_x), (whole_y, exponent_y) = parts(size_x), parts(size_y)
    rest, left = urem(whole_x, whole_y), exponent_x - exponent_y
    while left != 0:
        step = umin(left, 64 - (mantissa + 1))
        rest = urem(rest << step, whole_y)
        left -= step
    shift = umin(_leading_zeros(rest, i1(False)) - (63 - mantissa), exponent_y - 1)
    # The leading bit of a normal number adds the one that is missing in the exponent.
    exponent = exponent_y - shift - 1
    size = (exponent << mantissa) + (rest << shift)
    signed = select(rest == 0, 0, size) | (word_x & sign)
    leave(bitcast(trunc(signed, integer), x.type))
