"""The exact remainder of floats as code of our own: LLVM's `frem` would be a call to libm."""

from __future__ import annotations

from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.irtypes import Value, bits, constant

_MANTISSA = {"float": 23, "double": 52}


def fmod(fn: Function, x: Value, y: Value) -> Value:
    """x - y * trunc(x / y) without any rounding, with the sign of x, as C's fmod; one lane after another."""
    name = _function(fn.module, x.element)
    out = constant(x.type, 0.0)
    for lane in range(x.width):
        one = fn.call(name, [fn.extract(x, lane), fn.extract(y, lane)], x.element)
        out = fn.insert(out, one, lane)
    return out


def _function(module: Module, element: str) -> str:
    """A function (x, y) -> remainder of scalars, written once per module.

    Finite numbers are M 2**E with whole M. The rest of Mx 2**(Ex - Ey) divided by My is found as in long
    division: as many bits at a time as a word has room for beside the rest so far.
    """
    name = f"rlx_fmod_{element}"
    if module.defines(name):
        return name
    f = module.function(name, [(element, "x"), (element, "y")], internal=True, noinline=True, returns=element)
    x, y = f.args
    mantissa, integer = _MANTISSA[element], f"i{bits(element)}"
    sign = 1 << (bits(element) - 1)
    infinity = sign - (1 << mantissa)
    word_x, word_y = (f.zext(f.bitcast(v, integer), "i64") for v in (x, y))
    size_x, size_y = (f.value(f.and_(word, sign - 1)) for word in (word_x, word_y))
    undefined = f.or_(f.cmp("eq", size_y, 0), f.cmp("uge", size_x, infinity))
    undefined = f.or_(undefined, f.cmp("ugt", size_y, infinity))

    def not_a_number() -> None:
        product = f.fmul(x, y)  # of a NaN its bits, else a new one
        f.return_(f.fdiv(product, product))

    f.branch(f.value(undefined), not_a_number)
    f.branch(f.value(f.cmp("ult", size_x, size_y)), lambda: f.return_(x))

    def parts(size: Value) -> tuple[Value, Value]:
        """Whole number and exponent; denormals have the exponent of the smallest normal numbers."""
        exponent, fraction = f.lshr(size, mantissa), f.and_(size, (1 << mantissa) - 1)
        normal = f.cmp("ne", exponent, 0)
        whole = f.select(normal, f.value(f.or_(fraction, 1 << mantissa)), f.value(fraction))
        return whole, f.value(f.umax(exponent, 1))

    (whole_x, exponent_x), (whole_y, exponent_y) = parts(size_x), parts(size_y)
    most = 64 - (mantissa + 1)

    def divide(carried: list[Value]) -> list[Value]:
        rest, left = carried
        step = f.umin(left, most)
        return [f.value(f.urem(f.shl(rest, step), whole_y)), f.value(f.sub(left, step))]

    start = [f.value(f.urem(whole_x, whole_y)), f.value(f.sub(exponent_x, exponent_y))]
    rest, _ = f.while_loop(start, lambda carried: f.cmp("ne", carried[1], 0), divide)
    zeros = f.intrinsic("llvm.ctlz.i64", "i64", rest, constant("i1", False))
    shift = f.umin(f.sub(zeros, 63 - mantissa), f.sub(exponent_y, 1))
    # The leading bit of a normal number adds the one that is missing in the exponent.
    exponent = f.sub(f.sub(exponent_y, shift), 1)
    size = f.add(f.shl(exponent, mantissa), f.shl(rest, shift))
    size = f.select(f.cmp("eq", rest, 0), constant("i64", 0), f.value(size))
    signed = f.value(f.or_(size, f.and_(word_x, sign)))
    f.return_(f.bitcast(f.trunc(signed, integer), element))
    return name
