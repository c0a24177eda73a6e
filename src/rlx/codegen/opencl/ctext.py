"""Values in OpenCL C: types of memory and of variables, literals, loads and stores, casts, helper functions.

Half precision is stored as 16 bits and computed as float, bool is stored as a byte. Conversions of f16 and
bf16 are written out here, because cl_khr_fp16 is optional and bf16 is unknown to OpenCL C; they keep every
bit pattern.
"""

from __future__ import annotations

import math

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.dtype import DType

_INTEGERS = {
    "i8": "char",
    "i16": "short",
    "i32": "int",
    "i64": "long",
    "u8": "uchar",
    "u16": "ushort",
    "u32": "uint",
    "u64": "ulong",
}
MEMORY = {"f64": "double", "f32": "float", "f16": "ushort", "bf16": "ushort", "bool": "uchar", **_INTEGERS}
VARIABLE = {**MEMORY, "f16": "float", "bf16": "float", "bool": "bool"}
HALVES = ("f16", "bf16")

HELPERS = {
    "f16_value": """
static float f16_value(ushort h) {
    uint sign = (uint)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
    return as_float(sign | as_uint((float)fraction * 0x1p-24f));
}""",
    "f16_bits": """
static ushort f16_bits(float x) {  /* nearest, ties to even */
    uint bits = as_uint(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    uint payload = (size >> 13) & 1023;
    if (size > 0x7f800000) return (ushort)(sign | 0x7c00 | (payload ? payload : 0x200));
    if (size >= 0x477ff000) return (ushort)(sign | 0x7c00);
    if (size < 0x38800000)  /* the last bit of floats from 0.5 on is the smallest f16 */
        return (ushort)(sign | (as_uint(as_float(size) + 0.5f) - 0x3f000000));
    uint rebased = size - 0x38000000;
    return (ushort)(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
}""",
    "bf16_value": """
static float bf16_value(ushort h) { return as_float((uint)h << 16); }""",
    "bf16_bits": """
static ushort bf16_bits(float x) {  /* nearest, ties to even */
    uint bits = as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (ushort)((bits >> 16) | ((bits & 0x7f0000) ? 0 : 0x40));
    return (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}""",
}
# A wide value on its way to a half is first rounded to odd: the last bit of the float says "not exactly".
HELPERS |= {
    f"sticky_{type_}": f"""
static float sticky_{type_}({type_} x) {{
    float near = convert_float_rtz(x);
    return ({type_})near == x || x != x ? near : as_float(as_uint(near) | 1);
}}"""
    for type_ in ("double", "int", "uint", "long", "ulong")
}


def why_not(dtype: DType, float64: bool) -> str | None:
    """Why kernels cannot compute with a dtype; None if they can."""
    if dtype.name not in MEMORY:
        return f"dtype {dtype} has no OpenCL kernels"
    if dtype.name == "f64" and not float64:
        return "dtype f64 needs cl_khr_fp64, which this OpenCL device has not"
    return None


def memory_type(dtype: DType) -> str:
    """C type of one element in memory."""
    if dtype.name not in MEMORY:
        raise UnsupportedError(f"dtype {dtype} has no OpenCL kernels")
    return MEMORY[dtype.name]


def variable_type(dtype: DType) -> str:
    """C type of one element in a variable."""
    memory_type(dtype)
    return VARIABLE[dtype.name]


def wide_type(dtype: DType) -> str:
    """The unsigned type in which integers of a dtype wrap: smaller ones than int become int in C anyway."""
    return "ulong" if dtype.bits == 64 else "uint"


def from_memory(dtype: DType, stored: str) -> str:
    """What was read from memory, as a variable's value."""
    if dtype.name in HALVES:
        return f"{dtype.name}_value({stored})"
    return f"({stored} != 0)" if dtype.is_bool else stored


def to_memory(dtype: DType, value: str) -> str:
    """A variable's value as it is stored."""
    if dtype.name in HALVES:
        return f"{dtype.name}_bits({value})"
    return f"(uchar)({value})" if dtype.is_bool else value


def literal(value: float, dtype: DType) -> str:
    """A constant, exact to the bit."""
    variable_type(dtype)
    if dtype.is_bool:
        return "true" if value else "false"
    if dtype.is_int:
        whole = int(value) & ((1 << dtype.bits) - 1)
        suffix = "UL" if dtype.bits == 64 else "U"
        return f"({VARIABLE[dtype.name]}){whole:#x}{suffix}"
    rounded = np.asarray(value).astype(dtype.np)
    if dtype.name == "f64":
        number = float(rounded)
        if math.isfinite(number):
            return _signed(number.hex())
        return f"as_double({int(np.float64(number).view(np.uint64)):#x}UL)"
    single = np.float32(rounded)
    if math.isfinite(single):
        return _signed(f"{float(single).hex()}f")
    return f"as_float({int(single.view(np.uint32)):#x}U)"


def _signed(text: str) -> str:
    """Two minus signs in a row would be a decrement."""
    return f"({text})" if text.startswith("-") else text


def cast(value: str, source: DType, to: DType) -> str:
    """The cast op's rules: floats to integers truncate, saturate and turn NaN into 0; integers wrap."""
    target = variable_type(to)
    if source is to:
        return value
    if to.is_bool:
        return f"({value} != 0)"
    if to.is_int and source.is_float:
        return f"convert_{target}_sat_rtz({value})"
    if to.name not in HALVES:
        return value if VARIABLE[source.name] == target else f"({target}){value}"
    wide = f"sticky_{VARIABLE[source.name]}"
    single = f"{wide}({value})" if wide in HELPERS else f"(float){value}"
    return f"{to.name}_value({to.name}_bits({single}))"
