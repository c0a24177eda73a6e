"""Small arrays as text, exact to the bit, and back: f32[2]{1.0, -inf}.

Elements are written as the shortest number that gives the same bits; a NaN that is not the usual one is
written by its bits, as in 0x7f800001. Complex elements are written 1.0+2.0j.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from rlx.errors import ParseError
from rlx.ir.dtype import Array, DType, convert, dtype

_REAL = r"(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_FLOAT = re.compile(f"-?{_REAL}")
_COMPLEX = re.compile(f"(-?{_REAL})([+-]{_REAL})j")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_BITS = re.compile(r"0x[0-9a-f]{2,32}")


def array_text(array: Array) -> str:
    """Type and elements of an array.

    >>> array_text(np.array([[1.5, -0.0]], np.float32)), array_text(np.array(True))
    ('f32[1,2]{1.5, -0.0}', 'bool[]{true}')
    """
    of = dtype(array.dtype)
    shape = ",".join(map(str, array.shape))
    return f"{of}[{shape}]{{{', '.join(_element_texts(array.reshape(-1), of))}}}"


def read_elements(texts: Sequence[str], of: DType, shape: tuple[int, ...]) -> Array:
    """The array that `array_text` wrote as these elements.

    >>> read_elements(["1.5", "nan"], dtype("bf16"), (2,))
    array([1.5, nan], dtype=bfloat16)
    """
    count = math.prod(shape)
    if len(texts) != count:
        written = f"{of}[{','.join(map(str, shape))}]"
        raise ParseError(f"{written} has {count} elements, but {len(texts)} are written")
    if of.is_bool or of.is_int:
        return _read_integers(texts, of).reshape(shape)
    values = np.zeros(count, np.complex128 if of.is_complex else np.float64)
    bits: dict[int, bytes] = {}
    for i, text in enumerate(texts):
        if _BITS.fullmatch(text) and len(text) == 2 + 2 * of.itemsize and of.bits >= 8:
            bits[i] = int(text, 16).to_bytes(of.itemsize, "little")
        else:
            values[i] = _number(text, of)
    out = np.array(convert(values, of, saturate=False))
    raw = out.view(np.uint8).reshape(count, of.itemsize)
    for i, given in bits.items():
        raw[i] = list(given)
    return out.reshape(shape)


def _read_integers(texts: Sequence[str], of: DType) -> Array:
    words = {"true": 1, "false": 0} if of.is_bool else {}
    values = []
    for text in texts:
        value = words.get(text)
        if value is None and not of.is_bool and _INTEGER.fullmatch(text):
            value = int(text)
        if value is None or not of.min_value <= value <= of.max_value:
            wanted = "true or false" if of.is_bool else f"an integer from {of.min_value} to {of.max_value}"
            raise ParseError(f"{text!r} is not an element of {of}; write {wanted}")
        values.append(value)
    return np.array(values, np.uint64 if of is dtype("u64") else np.int64).astype(of.np)


def _number(text: str, of: DType) -> complex:
    if of.is_complex:
        parts = _COMPLEX.fullmatch(text)
        if parts is not None:
            return complex(float(parts[1]), float(parts[2]))
    elif _FLOAT.fullmatch(text):
        return float(text)
    raise ParseError(f"{text!r} is not an element of {of}")


def _element_texts(flat: Array, of: DType) -> list[str]:
    if of.is_bool:
        return ["true" if v else "false" for v in flat.tolist()]
    if of.is_int:
        return [str(int(v)) for v in flat]
    raw = np.ascontiguousarray(flat).view(np.uint8).reshape(len(flat), of.itemsize)
    out = [_complex_text(complex(v)) for v in flat] if of.is_complex else [_short(v) for v in flat]
    wrong = _inexact(out, raw, of)
    if wrong and not of.is_complex:
        for i in wrong:
            out[i] = repr(float(flat[i]))
        wrong = _inexact(out, raw, of)
    for i in wrong:
        out[i] = "0x" + raw[i, ::-1].tobytes().hex()
    return out


def _inexact(texts: Sequence[str], raw: Array, of: DType) -> list[int]:
    """Which texts do not give back the bytes of their elements."""
    again = read_elements(texts, of, (len(texts),)).view(np.uint8).reshape(raw.shape)
    return [int(i) for i in np.flatnonzero((again != raw).any(axis=1))]


def _short(value: np.generic) -> str:
    """The dtype's own shortest spelling, as a float: 0.1 for the f32 nearest to it."""
    text = str(value)
    return text + ".0" if text.lstrip("-").isdecimal() else text


def _complex_text(value: complex) -> str:
    imaginary = repr(value.imag)
    return f"{value.real!r}{imaginary if imaginary[0] == '-' else '+' + imaginary}j"
