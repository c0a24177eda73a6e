"""Dtypes: names, limits, exact conversion between all pairs, packed bytes.

Conversions are checked against exact rational arithmetic over the values of each format, not against NumPy.
"""

from __future__ import annotations

import bisect
import copy
import math
import pickle
import warnings
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import DTypeError, FormatError
from rlx.ir import dtype as module
from rlx.ir.dtype import (
    ALL_DTYPES,
    BF16,
    BOOL,
    C64,
    C128,
    F4E2M1,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E8M0,
    F16,
    F32,
    F64,
    I2,
    I4,
    I8,
    I32,
    I64,
    U2,
    U8,
    U64,
    DType,
    convert,
    dtype,
    pack,
    unpack,
    weak_scalar,
)

NAMES = (
    "f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64 bool c64 c128 "
    "f8e4m3fn f8e5m2 f8e4m3fnuz f8e5m2fnuz f8e8m0 f4e2m1 i2 u2 i4 u4"
).split()
SUB_BYTE = [d for d in ALL_DTYPES if d.bits < 8]
# Formats small enough to list every value, whose grid then decides what correct rounding is.
SMALL_FLOATS = [d for d in ALL_DTYPES if d.is_float and d.bits <= 16 and d is not F8E8M0]
INTS = [d for d in ALL_DTYPES if d.is_int]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- names and properties


def test_every_name_is_one_instance_and_a_constant() -> None:
    assert [d.name for d in ALL_DTYPES] == NAMES
    for name in NAMES:
        d = dtype(name)
        assert d is dtype(d) is dtype(d.np) is dtype(d.np.type) is dtype(d.np.name)
        assert getattr(module, name.upper()) is d
        assert str(d) == name and repr(d) == f"dtype('{name}')"
        assert pickle.loads(pickle.dumps(d)) is d and copy.deepcopy(d) is d
    with pytest.raises(AttributeError):
        F32.bits = 3  # type: ignore[misc]


def test_python_types() -> None:
    assert [dtype(t) for t in (bool, int, float, complex)] == [BOOL, I64, F32, C64]


def test_properties() -> None:
    assert F8E4M3FN.is_float and F8E4M3FN.storage_only and not F32.storage_only
    assert I4.is_int and U8.is_int and not BOOL.is_int and BOOL.is_bool
    assert I4.is_signed and F32.is_signed and not U8.is_signed and not F8E8M0.is_signed
    assert C64.is_complex and not C64.is_float
    assert (I4.itemsize, I4.bits, F4E2M1.itemsize, C128.itemsize) == (1, 4, 1, 16)
    assert [I4.nbytes(n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [I2.nbytes(n) for n in (4, 5)] == [1, 2] and F32.nbytes(3) == 12 and BOOL.nbytes(3) == 3


def test_limits() -> None:
    assert (I2.min_value, I2.max_value, U2.max_value, U64.max_value) == (-2, 1, 3, 2**64 - 1)
    assert (F8E4M3FN.max_value, F8E5M2.max_value, F8E4M3FNUZ.max_value, F4E2M1.min_value) == (
        448,
        57344,
        240,
        -6,
    )
    assert (F32.max_value, F8E8M0.min_value) == (float(np.finfo(np.float32).max), 2.0**-127)
    assert (F32.eps, BF16.eps, F8E5M2.eps) == (2.0**-23, 2.0**-7, 0.25)
    assert F8E5M2.has_inf and not F8E4M3FN.has_inf and F8E4M3FN.has_nan and not F4E2M1.has_nan
    with pytest.raises(DTypeError, match="i32 has no eps; only float and complex dtypes have one"):
        _ = I32.eps


@pytest.mark.parametrize(
    "bad", ["f8", "i3", "float", "", None, object, 3, np.dtype("U4"), np.dtype("M8[s]"), [F32]]
)
def test_unknown_dtype_lists_the_known_ones(bad: object) -> None:
    with pytest.raises(DTypeError, match=r"unknown dtype .*; use one of f64, f32, .* u4"):
        dtype(bad)


def test_foreign_byte_order() -> None:
    swapped = np.array([1.5, -2], np.dtype(np.float32).newbyteorder())
    with pytest.raises(DTypeError, match="not in this machine's byte order"):
        dtype(swapped.dtype)
    assert convert(swapped, F32).tolist() == [1.5, -2]
    assert convert(swapped, F32).dtype == F32.np


# -- weak scalars


def test_weak_scalar() -> None:
    assert weak_scalar(2, F16) is F16 and weak_scalar(2, I8) is I8 and weak_scalar(2, C64) is C64
    assert weak_scalar(2.5, BF16) is BF16 and weak_scalar(2.5, C64) is C64
    assert weak_scalar(True, BOOL) is BOOL and weak_scalar(True, I8) is I8 and weak_scalar(True, F32) is F32
    assert weak_scalar(1j, C128) is C128
    assert weak_scalar(np.float64(2), F32) is F64  # a NumPy scalar is not weak


@pytest.mark.parametrize(
    ("value", "other", "text"),
    [
        (
            2.5,
            I32,
            r"the Python float 2.5 cannot be combined with a tensor of i32; cast the tensor first, .* to f32",
        ),
        (
            1j,
            F32,
            r"the Python complex 1j cannot be combined with a tensor of f32; cast the tensor .* to c64",
        ),
        (
            2,
            BOOL,
            r"the Python int 2 cannot be combined with a tensor of bool; cast the tensor first, .* to i64",
        ),
        (300, U8, r"the int 300 does not fit u8 \(0 to 255\); cast the tensor to a wider dtype first"),
        (-1, U8, r"the int -1 does not fit u8"),
        ("2", F32, r"'2' of type str cannot be combined with a tensor"),
    ],
)
def test_weak_scalar_refusals(value: object, other: DType, text: str) -> None:
    with pytest.raises(DTypeError, match=text):
        weak_scalar(value, other)


# -- conversion


@cache
def grid(d: DType) -> list[float]:
    """All finite values of a small float format, ascending, each once."""
    codes = np.arange(2**d.bits, dtype=np.uint16 if d.bits > 8 else np.uint8).view(d.np)
    with np.errstate(invalid="ignore"):  # some codes are signalling NaNs
        values = codes.astype(np.float64)
    return sorted(set(values[np.isfinite(values)].tolist()))


def nearest_even(value: Fraction, d: DType) -> float:
    """The correctly rounded value; infinity stands for "rounds past the end of the range"."""
    values = grid(d)
    last = Fraction(values[-1])
    if abs(value) > last:
        # As if the grid went on by one more step, whose first half still rounds down.
        middle = last + (last - Fraction(values[-2])) / 2
        past = abs(value) > middle or (abs(value) == middle and not _is_even(values[-1], d))
        return math.copysign(math.inf if past else values[-1], value)
    right = bisect.bisect_left(values, value)
    if values[right] == value:
        return values[right]
    low, high = values[right - 1], values[right]
    below, above = value - Fraction(low), Fraction(high) - value
    if below == above:
        return low if _is_even(low, d) else high
    return low if below < above else high


def _is_even(value: float, d: DType) -> bool:
    code = np.array(value).astype(d.np).reshape(1).view(np.uint16 if d.bits > 8 else np.uint8)
    return int(code[0]) % 2 == 0


def check_float_result(got: float, value: Fraction, d: DType, saturate: bool) -> None:
    expected = nearest_even(value, d)
    if math.isinf(expected):
        if saturate or not d.has_nan:
            assert got == math.copysign(d.max_value, expected)
        elif d.has_inf:
            assert got == expected
        else:
            assert math.isnan(got)
    else:
        assert got == expected


@pytest.mark.parametrize("d", SMALL_FLOATS, ids=str)
@given(
    value=st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e3, 1e3)),
    saturate=st.booleans(),
)
def test_f64_rounds_once(d: DType, value: float, saturate: bool) -> None:
    got = float(convert(np.array(value), d, saturate=saturate))
    check_float_result(got, Fraction(value), d, saturate and d.storage_only)


@pytest.mark.parametrize("d", SMALL_FLOATS, ids=str)
def test_ties_and_their_neighbours(d: DType) -> None:
    """Midpoints of neighbouring values, and the f64 values next to each: where rounding twice goes wrong."""
    values = grid(d)
    for i in range(0, len(values) - 1, 1 if d.bits <= 8 else 997):
        exact = (values[i] + values[i + 1]) / 2
        for x in (math.nextafter(exact, -math.inf), exact, math.nextafter(exact, math.inf)):
            check_float_result(float(convert(np.array(x), d)), Fraction(x), d, saturate=not d.has_inf)


@pytest.mark.parametrize("d", SMALL_FLOATS, ids=str)
@pytest.mark.parametrize("source", [I64, U64, I32], ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_integers_round_once(d: DType, source: DType, data: st.DataObject) -> None:
    value = data.draw(st.integers(int(source.min_value), int(source.max_value)))
    got = float(convert(np.array(value, source.np), d))
    check_float_result(got, Fraction(value), d, saturate=not d.has_inf)


def test_a_sticky_bit_of_a_64_bit_integer_counts() -> None:
    tie = (1 << 62) + (1 << 54)
    assert int(float(convert(np.array(tie), BF16))) == 1 << 62
    assert int(float(convert(np.array(tie + 1), BF16))) == (1 << 62) + (1 << 55)
    assert int(float(convert(np.array(-tie - 1), BF16))) == -((1 << 62) + (1 << 55))
    assert int(float(convert(np.array((1 << 63) + (1 << 55) + 1, np.uint64), BF16))) == (1 << 63) + (1 << 56)


def test_special_values() -> None:
    special = np.array([np.inf, -np.inf, np.nan, -0.0])

    def to(d: DType, saturate: bool | None = None) -> list[str]:
        return [f"{v:g}" for v in convert(special, d, saturate).astype(np.float64)]

    assert to(F16) == to(BF16) == to(F32) == to(F8E5M2) == ["inf", "-inf", "nan", "-0"]
    assert to(F8E5M2, saturate=True) == ["57344", "-57344", "nan", "-0"]
    assert to(F8E4M3FN) == ["448", "-448", "nan", "-0"]
    assert to(F8E4M3FN, saturate=False) == ["nan", "nan", "nan", "-0"]
    assert to(F8E4M3FNUZ) == ["240", "-240", "nan", "0"]
    assert to(F4E2M1) == to(F4E2M1, saturate=False) == ["6", "-6", "0", "-0"]
    assert to(F16, saturate=True) == ["inf", "-inf", "nan", "-0"]  # saturation is for 8-bit formats


def test_powers_of_two() -> None:
    values = np.array([1.0, 1.25, 1.5, 3.0, 2.0**-130, 0.0, 2.0**128, np.inf, np.nan, -1.0])

    def to(saturate: bool | None, rounding: str) -> list[float]:
        return convert(values, F8E8M0, saturate, rounding).astype(np.float64).tolist()

    low, high, nan = 2.0**-127, 2.0**127, math.nan
    np.testing.assert_array_equal(to(None, "nearest"), [1, 1, 2, 4, low, low, high, high, nan, nan])
    np.testing.assert_array_equal(to(True, "up"), [1, 2, 2, 4, low, low, high, high, nan, nan])
    np.testing.assert_array_equal(to(True, "down"), [1, 1, 1, 2, low, low, high, high, nan, nan])
    np.testing.assert_array_equal(to(False, "nearest"), [1, 1, 2, 4, nan, nan, nan, nan, nan, nan])
    with pytest.raises(DTypeError, match="unknown rounding 'even' for f8e8m0; use nearest, up or down"):
        convert(values, F8E8M0, rounding="even")


@pytest.mark.parametrize("d", INTS, ids=str)
@given(
    value=st.one_of(
        st.floats(), st.floats(-300, 300), st.sampled_from([2.0**63, -(2.0**63), 2.0**64, 2.0**31])
    )
)
def test_float_to_int_truncates_and_saturates(d: DType, value: float) -> None:
    got = int(convert(np.array(value), d))
    if math.isnan(value):
        expected = 0
    elif math.isinf(value):
        expected = int(d.max_value if value > 0 else d.min_value)
    else:
        expected = min(max(math.trunc(value), int(d.min_value)), int(d.max_value))
    assert got == expected


@pytest.mark.parametrize("d", INTS, ids=str)
@pytest.mark.parametrize("source", INTS, ids=str)
def test_int_to_int_wraps(d: DType, source: DType) -> None:
    low, high = int(source.min_value), int(source.max_value)
    values = sorted({low, low + 1, high, high - 1, 0, 1, high // 3, low // 3, high // 7})
    got = convert(np.array(values, dtype=source.np if source.bits >= 8 else np.int8).astype(source.np), d)
    wrapped = [(v - int(d.min_value)) % 2**d.bits + int(d.min_value) for v in values]
    assert [int(v) for v in got] == wrapped


def test_to_bool_and_from_complex() -> None:
    for d in ALL_DTYPES:
        if d is not F8E8M0:  # has no zero
            assert convert(convert([0, 1], d), BOOL).tolist() == [False, True]
    assert convert([np.nan, -0.0], BOOL).tolist() == [True, False]
    assert convert([0j, 1j], BOOL).tolist() == [False, True]
    assert convert([1.9 + 5j, -2.9 - 1j], I32).tolist() == [1, -2]
    assert convert(np.array([1.5 + 2j]), BF16).tolist() == [1.5]
    assert convert(convert([1.5, 2], BF16), C64).tolist() == [1.5, 2]


@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
def test_every_pair_keeps_shape_and_small_values(source: DType) -> None:
    for target in ALL_DTYPES:
        for shape in [(), (0,), (3, 2)]:
            got = convert(convert(np.ones(shape), source), target)
            assert type(got) is np.ndarray and got.dtype == target.np and got.shape == shape
            assert np.array_equal(convert(got, F32), np.ones(shape))


def test_same_dtype_is_not_copied() -> None:
    x = np.arange(3.0)
    assert convert(x, F64) is x


def test_strided_input() -> None:
    x = np.arange(12.0).reshape(3, 4).T[::2]
    assert convert(x, BF16).tolist() == x.tolist() and convert(x, I4).tolist() == [[0, 4, 7], [2, 6, 7]]


# -- packing


@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8])
def test_pack_round_trips(d: DType, n: int) -> None:
    values = convert(np.arange(n) % 4 - (2 if d.is_signed else 0), d)
    data = pack(values, d)
    assert data.dtype == np.uint8 and data.size == d.nbytes(n)
    again = unpack(data.tobytes(), d, n)
    assert again.dtype == d.np and again.tobytes() == values.tobytes()
    assert unpack(data, d, n).tobytes() == values.tobytes()


@pytest.mark.parametrize("d", SUB_BYTE, ids=str)
def test_every_byte_unpacks_and_packs(d: DType) -> None:
    every = np.arange(256, dtype=np.uint8)
    elements = unpack(every, d, 256 * 8 // d.bits)
    assert np.array_equal(pack(elements, d), every)
    assert len({float(v) for v in elements}) == 2**d.bits - (1 if d is F4E2M1 else 0)  # -0 equals 0


def test_pack_is_low_bits_first() -> None:
    assert pack(convert([1, -1, 0, -2, 1], I2), I2).tolist() == [0b10_00_11_01, 0b01]
    assert pack(convert([1.5, -6], F4E2M1), F4E2M1).tolist() == [0b1111_0011]
    assert unpack(b"\x21\x0f", I4, 3).tolist() == [1, 2, -1]


def test_pack_refusals() -> None:
    with pytest.raises(DTypeError, match="cannot pack an array of int64 as i4; convert it first"):
        pack(np.arange(3), I4)
    with pytest.raises(FormatError, match="3 elements of i4 take 2 bytes, not the 1 given"):
        unpack(b"\x21", I4, 3)


def test_ml_dtypes_scalar_types_are_known() -> None:
    assert dtype(ml_dtypes.bfloat16) is BF16 and dtype(np.float32) is F32
