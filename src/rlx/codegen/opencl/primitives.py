"""Every scalar primitive in OpenCL C, as a template. One that is missing here has no OpenCL kernel.

{0} {1} {2} are the operands, {T} their type, {U} the unsigned type in which integers wrap, {N} their bits.
Signed overflow is undefined in C, hence the detours through {U}; max and min choose by comparison, because
fmax and fmin of OpenCL drop NaN.
"""

from __future__ import annotations

from rlx.codegen.opencl.ctext import MEMORY, from_memory, memory_type, to_memory, variable_type, wide_type
from rlx.errors import UnsupportedError
from rlx.ir.dtype import DType
from rlx.ir.dtype import dtype as as_dtype

_COMPARE = {
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "where": "{0} ? {1} : {2}",
}
_SAME_NAME = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan atan2 sinh cosh asinh acosh "
    "atanh erf erfc floor ceil trunc fmod pow"
).split()

FLOATS = {
    **_COMPARE,
    **{name: f"{name}({{0}}, {{1}})" for name in ("atan2", "fmod", "pow")},
    **{name: f"{name}({{0}})" for name in _SAME_NAME if name not in ("atan2", "fmod", "pow")},
    "neg": "-{0}",
    "abs": "fabs({0})",
    "sign": "{0} > 0 ? ({T})1 : {0} < 0 ? ({T})-1 : {0} == 0 ? ({T})0 : {0}",
    "round": "rint({0})",
    "rsqrt": "({T})1 / sqrt({0})",
    "is_nan": "{0} != {0}",
    "is_inf": "fabs({0}) == ({T})INFINITY",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "exp_difference": "exp({0} - {1})",
    "trunc_div": "trunc({0} / {1})",
    "maximum": "({0} != {0} || {0} > {1}) ? {0} : {1}",
    "minimum": "({0} != {0} || {0} < {1}) ? {0} : {1}",
    "sigmoid": "sigmoid_{T}({0})",
    "tanh": "tanh_{T}({0})",
    "mod": "mod_{T}({0}, {1})",
    "floor_div": "floor_div_{T}({0}, {1})",
}

INTEGERS = {
    **_COMPARE,
    "neg": "({T})(0 - ({U}){0})",
    "abs": "{0} < 0 ? ({T})(0 - ({U}){0}) : {0}",
    "sign": "({T})(({0} > 0) - ({0} < 0))",
    "add": "({T})(({U}){0} + ({U}){1})",
    "sub": "({T})(({U}){0} - ({U}){1})",
    "mul": "({T})(({U}){0} * ({U}){1})",
    "maximum": "{0} > {1} ? {0} : {1}",
    "minimum": "{0} < {1} ? {0} : {1}",
    "bitwise_not": "({T})~{0}",
    "bitwise_and": "({T})({0} & {1})",
    "bitwise_or": "({T})({0} | {1})",
    "bitwise_xor": "({T})({0} ^ {1})",
    "shift_left": "({1} >= 0 && {1} < {N}) ? ({T})(({U}){0} << {1}) : ({T})0",
    "shift_right": "({1} >= 0 && {1} < {N}) ? ({T})({0} >> {1}) : ({T})({0} < 0 ? -1 : 0)",
    "pow": "pow_{T}({0}, {1})",
    **{name: f"{name}_{{T}}({{0}}, {{1}})" for name in ("floor_div", "trunc_div", "mod", "fmod")},
}

BOOLEANS = {
    **_COMPARE,
    "logical_not": "!{0}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_xor": "{0} != {1}",
    "maximum": "{0} || {1}",
    "minimum": "{0} && {1}",
}

_FLOAT_HELPERS = {
    "sigmoid": """
static {T} sigmoid_{T}({T} x) {{
    {T} small = exp(-fabs(x));
    return (x >= 0 ? ({T})1 : small) / (1 + small);
}}""",
    "tanh": """
static {T} tanh_{T}({T} x) {{  /* drivers may give a little less than 1 at infinity */
    {T} shrunk = expm1(-2 * fabs(x));
    return copysign(-shrunk / (shrunk + 2), x);
}}""",
    "mod": """
static {T} mod_{T}({T} x, {T} y) {{  /* the sign of y, as NumPy */
    {T} rest = fmod(x, y);
    if (rest == 0) return copysign(({T})0, y);
    return (rest < 0) != (y < 0) ? rest + y : rest;
}}""",
    "floor_div": """
static {T} floor_div_{T}({T} x, {T} y) {{  /* floor of the exact quotient, not of the rounded one */
    if (y == 0) return x / y;
    {T} rest = fmod(x, y), quotient = (x - rest) / y;
    if (rest != 0 && (rest < 0) != (y < 0)) quotient -= 1;
    {T} whole = floor(quotient);
    if (quotient - whole > ({T})0.5) whole += 1;
    return whole == 0 ? copysign(({T})0, x / y) : whole;
}}""",
}

# Division by zero gives 0; the one overflow, lowest / -1, wraps.
_INTEGER_HELPERS = {
    "trunc_div": """
static {T} trunc_div_{T}({T} x, {T} y) {{
    if (y == 0) return 0;
    return y == ({T})-1 && ({T})-1 < 0 ? ({T})(0 - ({U})x) : ({T})(x / y);
}}""",
    "fmod": """
static {T} fmod_{T}({T} x, {T} y) {{
    if (y == 0 || (y == ({T})-1 && ({T})-1 < 0)) return 0;
    return ({T})(x % y);
}}""",
    "floor_div": """
static {T} floor_div_{T}({T} x, {T} y) {{
    if (y == 0) return 0;
    if (y == ({T})-1 && ({T})-1 < 0) return ({T})(0 - ({U})x);
    {T} quotient = x / y, rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? quotient - 1 : quotient;
}}""",
    "mod": """
static {T} mod_{T}({T} x, {T} y) {{
    if (y == 0 || (y == ({T})-1 && ({T})-1 < 0)) return 0;
    {T} rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}}""",
    "pow": """
static {T} pow_{T}({T} x, {T} y) {{
    if (y < 0) return x == 1 ? 1 : x == ({T})-1 ? ((y & 1) ? ({T})-1 : 1) : 0;
    {U} result = 1, base = ({U})x;
    for (; y != 0; y >>= 1, base *= base) if (y & 1) result *= base;
    return ({T})result;
}}""",
}


def template_of(name: str, dtype: DType) -> str | None:
    """The template of a primitive on operands of a dtype, or None."""
    table = BOOLEANS if dtype.is_bool else FLOATS if dtype.is_float else INTEGERS
    return table.get(name)


def why_not(name: str, dtype: DType) -> str | None:
    """Why there is no OpenCL C for a primitive on operands of a dtype; None if there is."""
    if name.startswith("bitcast_"):
        known = name.removeprefix("bitcast_") in MEMORY and dtype.name in MEMORY
    else:
        known = template_of(name, dtype) is not None
    return None if known else f"primitive {name!r} on {dtype} has no OpenCL C"


def write(name: str, dtype: DType, operands: list[str]) -> tuple[str, tuple[str, str] | None]:
    """A primitive applied to operands, and the helper function that it calls: (name, text)."""
    refused = why_not(name, dtype)
    if refused is not None:
        raise UnsupportedError(refused)
    if name.startswith("bitcast_"):
        to = as_dtype(name.removeprefix("bitcast_"))
        return from_memory(to, f"as_{memory_type(to)}({to_memory(dtype, operands[0])})"), None
    template = template_of(name, dtype)
    assert template is not None
    words = {"T": variable_type(dtype), "U": wide_type(dtype), "N": dtype.bits}
    helpers = _FLOAT_HELPERS if dtype.is_float else _INTEGER_HELPERS
    helper = None
    if name in helpers and not dtype.is_bool:
        helper = (f"{name}_{words['T']}", helpers[name].format(**words))
    return template.format(*operands, **words), helper
