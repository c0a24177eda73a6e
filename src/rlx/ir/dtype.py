"""Element types: one interned `DType` per name, exact conversion between all of them, packed bytes.

Storage-only dtypes (8-bit and smaller floats, 2- and 4-bit integers) hold values but are not computed in.
In NumPy arrays every element takes at least one byte; `pack` gives the dense bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import ml_dtypes
import numpy as np

from rlx.errors import DTypeError, FormatError, InputError
from rlx.records import dataclass

if TYPE_CHECKING:  # numpy.typing is slow to import
    from numpy.typing import ArrayLike, DTypeLike, NDArray

Array: TypeAlias = np.ndarray


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class DType:
    """An element type. There is one instance per name, so `is` and `==` mean the same.

    >>> dtype("bf16").bits, dtype("i4").nbytes(3), str(F32)
    (16, 2, 'f32')
    """

    name: str
    np: np.dtype
    """The NumPy dtype of arrays that hold these values (sub-byte elements take one byte each)."""
    bits: int
    """Bits of one element in packed storage."""
    kind: str
    """"f" float, "i" signed, "u" unsigned, "b" bool, "c" complex."""
    storage_only: bool
    min_value: float
    """Lowest finite value (an int for integers; of the parts, for complex)."""
    max_value: float
    """Highest finite value (an int for integers; of the parts, for complex)."""
    has_inf: bool
    has_nan: bool

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        """Signed or unsigned integer (bool is neither)."""
        return self.kind in "iu"

    @property
    def is_signed(self) -> bool:
        """Can hold negative values."""
        return self.min_value < 0

    @property
    def is_complex(self) -> bool:
        return self.kind == "c"

    @property
    def is_bool(self) -> bool:
        return self.kind == "b"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in a NumPy array (unpacked)."""
        return self.np.itemsize

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next value above it (of the parts, for complex)."""
        if self.kind not in "fc":
            raise DTypeError(f"{self.name} has no eps; only float and complex dtypes have one")
        return float(_float_limits(self.np).eps)

    def nbytes(self, n: int) -> int:
        """Bytes of `n` packed elements, rounded up to whole bytes."""
        return (n * self.bits + 7) // 8

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"dtype({self.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return dtype, (self.name,)


_BY_NAME: Final[dict[str, DType]] = {}
_BY_NUMPY: Final[dict[np.dtype, DType]] = {}


def _float_limits(numpy_dtype: np.dtype) -> np.finfo:
    return ml_dtypes.finfo(numpy_dtype)  # type: ignore[no-untyped-call]


def _declare(name: str, numpy_type: DTypeLike, bits: int, kind: str, storage_only: bool = False) -> DType:
    numpy_dtype = np.dtype(numpy_type)
    low: float = 0
    high: float = 1
    if kind in "iu":
        low, high = (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    elif kind in "fc":
        limits = _float_limits(numpy_dtype)
        low, high = float(limits.min), float(limits.max)
    with np.errstate(all="ignore"):
        has_inf = kind in "fc" and bool(np.isinf(np.array(math.inf).astype(numpy_dtype)))
        has_nan = kind in "fc" and bool(np.isnan(np.array(math.nan).astype(numpy_dtype)))
    made = DType(name, numpy_dtype, bits, kind, storage_only, low, high, has_inf, has_nan)
    _BY_NAME[name] = _BY_NUMPY[numpy_dtype] = made
    return made


F64: Final = _declare("f64", np.float64, 64, "f")
F32: Final = _declare("f32", np.float32, 32, "f")
F16: Final = _declare("f16", np.float16, 16, "f")
BF16: Final = _declare("bf16", ml_dtypes.bfloat16, 16, "f")
I8: Final = _declare("i8", np.int8, 8, "i")
I16: Final = _declare("i16", np.int16, 16, "i")
I32: Final = _declare("i32", np.int32, 32, "i")
I64: Final = _declare("i64", np.int64, 64, "i")
U8: Final = _declare("u8", np.uint8, 8, "u")
U16: Final = _declare("u16", np.uint16, 16, "u")
U32: Final = _declare("u32", np.uint32, 32, "u")
U64: Final = _declare("u64", np.uint64, 64, "u")
BOOL: Final = _declare("bool", np.bool_, 8, "b")
C64: Final = _declare("c64", np.complex64, 64, "c")
C128: Final = _declare("c128", np.complex128, 128, "c")
F8E4M3FN: Final = _declare("f8e4m3fn", ml_dtypes.float8_e4m3fn, 8, "f", storage_only=True)
F8E5M2: Final = _declare("f8e5m2", ml_dtypes.float8_e5m2, 8, "f", storage_only=True)
F8E4M3FNUZ: Final = _declare("f8e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 8, "f", storage_only=True)
F8E5M2FNUZ: Final = _declare("f8e5m2fnuz", ml_dtypes.float8_e5m2fnuz, 8, "f", storage_only=True)
F8E8M0: Final = _declare("f8e8m0", ml_dtypes.float8_e8m0fnu, 8, "f", storage_only=True)
F4E2M1: Final = _declare("f4e2m1", ml_dtypes.float4_e2m1fn, 4, "f", storage_only=True)
I2: Final = _declare("i2", ml_dtypes.int2, 2, "i", storage_only=True)
U2: Final = _declare("u2", ml_dtypes.uint2, 2, "u", storage_only=True)
I4: Final = _declare("i4", ml_dtypes.int4, 4, "i", storage_only=True)
U4: Final = _declare("u4", ml_dtypes.uint4, 4, "u", storage_only=True)

ALL_DTYPES: Final = tuple(_BY_NAME.values())

_BY_NUMPY_NAME: Final = {d.np.name: d for d in ALL_DTYPES}
_BY_PYTHON_TYPE: Final[dict[type, DType]] = {bool: BOOL, int: I64, float: F32, complex: C64}


def dtype(x: object) -> DType:
    """The `DType` that `x` names.

    `x` is a DType, one of our names ("f32"), a full NumPy or ml_dtypes name ("float32", "int4"), a NumPy
    dtype or scalar type, or a Python type: bool -> bool, int -> i64, float -> f32, complex -> c64 (single
    precision is what models mean by a float). NumPy's short codes are refused: "i2" is our 2-bit integer.

    >>> dtype("float32"), dtype(np.int8), dtype(float), dtype("i4").np
    (dtype('f32'), dtype('i8'), dtype('f32'), dtype(int4))
    """
    if isinstance(x, DType):
        return x
    found: DType | None = None
    if isinstance(x, str):
        found = _BY_NAME.get(x) or _BY_NUMPY_NAME.get(x)
    elif isinstance(x, np.dtype):
        found = _BY_NUMPY.get(x)
    elif isinstance(x, type):
        found = _BY_PYTHON_TYPE.get(x) or (_BY_NUMPY.get(np.dtype(x)) if issubclass(x, np.generic) else None)
    if found is None:
        if isinstance(x, np.dtype) and not x.isnative:
            raise DTypeError(f"{x!r} is not in this machine's byte order; call .astype({x.name!r}) first")
        if isinstance(x, np.dtype) and x.kind == "O":
            raise DTypeError("an array of Python objects is not supported; convert it: .astype(np.float32)")
        if isinstance(x, np.dtype) and x.names is not None:
            fields = ", ".join(x.names) or "none"
            raise DTypeError(f"an array with fields ({fields}) is not supported; give one field as an array")
        raise DTypeError(f"unknown dtype {x!r}; use one of {', '.join(_BY_NAME)}")
    return found


def plain_array(value: object, what: str = "a value") -> np.ndarray:
    """`value` as a plain array. What would silently lose its meaning as one is refused.

    >>> plain_array([1.0, 2.0])
    array([1., 2.])
    """
    if type(value) is np.ndarray:
        return value
    refuse_lossy(value, what)
    return np.asarray(value)


def constant_array(value: object) -> np.ndarray:
    """A constant as an array: Python's floats are f32; NumPy's scalars, np.float64 too, are what they are.

    >>> constant_array(0.5).dtype.name, constant_array(np.float64(0.5)).dtype.name
    ('float32', 'float64')
    """
    array = plain_array(value, "a constant")
    is_pythons = isinstance(value, float) and not isinstance(value, np.generic)
    return array.astype(np.float32) if is_pythons else array


def refuse_lossy(value: object, what: str) -> None:
    """Masked arrays lose their mask, matrices their products; also as elements of a list."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(
            f"{what} is a masked array, whose mask would be lost; call .filled(number), or give the mask "
            "as an array of its own"
        )
    if isinstance(value, np.matrix):
        raise InputError(f"{what} is a NumPy matrix, whose * is a matmul; give np.asarray(matrix)")
    if isinstance(value, (list, tuple)):
        for each in value:
            if not isinstance(each, (int, float)):
                refuse_lossy(each, what)


def weak_scalar(value: object, other: DType) -> DType:
    """The dtype that a scalar takes next to a tensor of dtype `other` (the weak rule of NumPy 2).

    A Python scalar takes the dtype of the tensor if that can hold its kind (bool < int < float < complex);
    otherwise the tensor must be cast first. A NumPy scalar keeps its own dtype.

    >>> weak_scalar(2, F16), weak_scalar(True, I8)
    (dtype('f16'), dtype('i8'))
    """
    if isinstance(value, np.generic):
        return dtype(value.dtype)
    if isinstance(value, bool):
        return other
    if isinstance(value, int):
        if other.is_int and not other.min_value <= value <= other.max_value:
            raise DTypeError(
                f"the int {value} does not fit {other} ({other.min_value} to {other.max_value}); "
                "cast the tensor to a wider dtype first"
            )
        if not other.is_bool:
            return other
    elif isinstance(value, float):
        if other.is_float or other.is_complex:
            return other
    elif isinstance(value, complex):
        if other.is_complex:
            return other
    else:
        raise DTypeError(
            f"{value!r} of type {type(value).__name__} cannot be combined with a tensor; give a number"
        )
    raise DTypeError(
        f"the Python {type(value).__name__} {value!r} cannot be combined with a tensor of {other}; "
        f"cast the tensor first, for example to {dtype(type(value))}"
    )


def convert(array: ArrayLike, to: object, saturate: bool | None = None, rounding: str = "nearest") -> Array:
    """`array` with its values converted to dtype `to`; the array itself if it has that dtype already.

    - float or int -> float: the nearest value, ties to even, in one rounding from any source width. Out of
      range gives infinity, or NaN where the format has no infinity. `saturate=True` clamps to the highest
      finite value instead, infinities included; it concerns only f8* (f4e2m1 always clamps). By default
      formats without infinity saturate and the others do not. NaN becomes 0 in f4e2m1, which has none.
    - to f8e8m0 (powers of two): `rounding` is "nearest" (ties up), "up" or "down". Negative values give NaN;
      zero and values below the smallest give the smallest if saturating, else NaN.
    - float -> int: truncated toward zero, NaN gives 0, out of range gives the nearest end of the range.
    - int -> int: wraps (keeps the low bits). Anything -> bool: != 0 (NaN is true).
    - complex -> real: the real part.

    >>> convert(np.array([1.9, -1.9, np.nan, 1e9]), "i8").tolist()
    [1, -1, 0, 127]
    """
    target = dtype(to)
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    source = dtype(array.dtype)
    if source is target:
        return np.asarray(array)
    with np.errstate(all="ignore"):
        if source.storage_only:  # exact, and NumPy knows the rest from there
            array = array.astype(np.float32 if source.is_float else np.int8)
        return np.asarray(_convert_values(array, target, saturate, rounding))


def _convert_values(array: Array, target: DType, saturate: bool | None, rounding: str) -> Array:
    if target.is_bool:
        return np.asarray(array != 0)
    if target.is_complex:
        return array.astype(np.float32 if array.dtype == BF16.np else array.dtype).astype(target.np)
    if array.dtype.kind == "c":
        array = array.real
    if target.is_float:
        return _to_float(array, target, saturate, rounding)
    if array.dtype.kind in "iub":
        return array.astype(target.np)
    return _float_to_int(array, target)


def _to_float(array: Array, target: DType, saturate: bool | None, rounding: str) -> Array:
    if target in (F64, F32, F16):
        return array.astype(target.np)
    if saturate is None:
        saturate = not target.has_inf
    if target is F8E8M0:
        return _to_power_of_two(array, saturate, rounding)
    single = _to_f32_sticky(array)
    if target is BF16:
        return single.astype(target.np)
    if not target.has_nan:
        return np.where(np.isnan(single), np.float32(0), single).astype(target.np)
    if saturate:
        # NaN passes through clip; a value that would round up past the end is clamped before it can.
        single = np.clip(single, target.min_value, target.max_value)
    return single.astype(target.np)


def _to_f32_sticky(array: Array) -> Array:
    """f32 values from which rounding to a narrower format gives what one rounding from `array` would.

    Rounding f64 -> f32 -> bf16 to nearest twice can land on the wrong side of a tie. Rounding to odd in the
    first step keeps the information "not exactly here" in the last bit, and f32 has bits to spare for it.
    """
    if array.dtype == np.float32 or array.dtype.itemsize <= 2:
        return array.astype(np.float32)
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        # 64-bit integers do not fit f64: fold the 11 low bits of large ones into one sticky bit.
        large = (array >= 2**53) | (array <= -(2**53) if array.dtype.kind == "i" else False)
        low_bits = array.dtype.type(0x7FF)
        sticky = ((array & low_bits) != 0).astype(array.dtype) << array.dtype.type(11)
        array = np.where(large, (array & ~low_bits) | sticky, array)
    exact = array.astype(np.float64)
    single = exact.astype(np.float32)
    inexact_even = (single != exact) & ~np.isnan(exact) & (single.view(np.uint32) & 1 == 0)
    toward = np.where(exact > single, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact_even, np.nextafter(single, toward), single)


def _to_power_of_two(array: Array, saturate: bool, rounding: str) -> Array:
    """f8e8m0: the biased exponent is the byte; 255 is NaN."""
    if rounding not in ("nearest", "up", "down"):
        raise DTypeError(f"unknown rounding {rounding!r} for f8e8m0; use nearest, up or down")
    values = array.astype(np.float64)
    mantissa, exponent = np.frexp(values)  # values = mantissa * 2**exponent, mantissa in [0.5, 1)
    round_up = mantissa >= {"nearest": 0.75, "up": np.nextafter(0.5, 1), "down": 1.0}[rounding]
    code = exponent.astype(np.int64) + 126 + round_up
    code = np.where(values == 0, -1, np.where(values == np.inf, 255, code))
    in_range = np.clip(code, 0, 254) if saturate else np.where((code >= 0) & (code <= 254), code, 255)
    code = np.where(np.isnan(values) | (values < 0), 255, in_range)
    return np.asarray(code.astype(np.uint8).view(F8E8M0.np))


def _float_to_int(array: Array, target: DType) -> Array:
    values = np.trunc(array.astype(np.float64))
    # The upper end as a float: max_value + 1 is a power of two, so exact, where max_value may not be.
    above = values >= float(target.max_value + 1)
    below = values < float(target.min_value)
    inside = np.where(above | below | np.isnan(values), 0.0, values)
    wide = inside.astype(np.int64 if target.is_signed else np.uint64)
    wide = np.where(above, wide.dtype.type(target.max_value), wide)
    return np.where(below, wide.dtype.type(target.min_value), wide).astype(target.np)


def pack(array: Array, to: object) -> NDArray[np.uint8]:
    """The dense bytes of `array`, whose dtype must be `to`, in C order; sub-byte elements low bits first.

    >>> pack(convert([1, 2, -1], I4), I4).tolist()
    [33, 15]
    """
    target = dtype(to)
    array = np.asarray(array)
    if array.dtype != target.np:
        raise DTypeError(f"cannot pack an array of {array.dtype.name} as {target}; convert it first")
    flat = np.ascontiguousarray(array).reshape(-1)
    if target.bits >= 8:
        return flat.view(np.uint8)
    per_byte = 8 // target.bits
    codes = flat.view(np.uint8) if target.is_float else flat.astype(np.int8).view(np.uint8)
    padded = np.zeros(target.nbytes(flat.size) * per_byte, np.uint8)
    padded[: flat.size] = codes & ((1 << target.bits) - 1)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(target.bits)
    return np.asarray(np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1), np.uint8)


def unpack(
    data: bytes | bytearray | memoryview | NDArray[np.uint8], to: object, n: int, copy: bool = True
) -> Array:
    """The `n` elements of dtype `to` whose dense bytes are `data` (the inverse of `pack`), as a 1-D array.
    Without `copy`, it is a view on `data` where elements are whole bytes.

    >>> unpack(bytes([33, 15]), I4, 3).tolist()
    [1, 2, -1]
    """
    target = dtype(to)
    raw = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if raw.size != target.nbytes(n):
        raise FormatError(f"{n} elements of {target} take {target.nbytes(n)} bytes, not the {raw.size} given")
    if target.bits >= 8:
        return (raw.copy() if copy else raw).view(target.np)
    shifts = np.arange(8 // target.bits, dtype=np.uint8) * np.uint8(target.bits)
    codes = ((raw[:, None] >> shifts) & np.uint8((1 << target.bits) - 1)).reshape(-1)[:n]
    if target.is_float:
        return codes.view(target.np)
    return codes.astype(target.np)  # wraps, so the top bit becomes the sign


class LazyArray:
    """Dtype and shape of an array that is made whenever NumPy needs it, and held by nobody.

    `fill`, if given, writes the bytes of the array to a place instead of making it. `part(start, stop)`, if
    given, makes these elements only, counted in row-major order.

    >>> lazy = LazyArray(dtype("f32"), (2,), lambda: np.ones(2, np.float32))
    >>> lazy.nbytes, np.asarray(lazy)
    (8, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        of: DType,
        shape: tuple[int, ...],
        make: Callable[[], Array],
        fill: Callable[[Array], None] | None = None,
        part: Callable[[int, int], Array] | None = None,
    ) -> None:
        self.dtype, self.shape, self._make, self._fill, self.part = of.np, shape, make, fill, part
        self.nbytes = math.prod(shape) * of.np.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self._make(), dtype)

    def __repr__(self) -> str:
        return f"<lazy array {self.dtype}{list(self.shape)}>"

    def write_to(self, place: Array) -> None:
        """Write the array to `nbytes` bytes that are zero.

            >>> place = np.zeros(8, np.uint8)
        >>> LazyArray(dtype("i32"), (2,), lambda: np.array([1, 2], np.int32)).write_to(place)
        >>> place.view(np.int32)
        array([1, 2], dtype=int32)
        """
        if self._fill is not None:
            self._fill(place)
        else:
            place[:] = np.ascontiguousarray(self._make()).reshape(-1).view(np.uint8)


ParamValue = Array | LazyArray
"""The value of a param."""


def by_parts(value: ParamValue) -> Callable[[int, int], Array]:
    """How to take elements start..stop of an array, in row-major order; no others are made, if it has parts.

    >>> by_parts(np.arange(6).reshape(2, 3))(1, 4)
    array([1, 2, 3])
    """
    if isinstance(value, LazyArray) and value.part is not None:
        return value.part
    flat = np.asarray(value).reshape(-1)
    return lambda start, stop: flat[start:stop]
