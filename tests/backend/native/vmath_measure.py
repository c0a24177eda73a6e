"""Measures the vectorised math functions against references of higher precision, in ulp."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.codegen.native import jit, vmath
from rlx.codegen.native.irtext import Function, Module, Value, vector
from rlx.target.cpu import Target, resolve, runs_here

DTYPES: dict[str, Any] = {"float": np.float32, "double": np.float64}
COLUMNS = (("x86-64-v4", "AVX-512"), ("x86-64-v3", "AVX2"), ("x86-64", "SSE2"))
MEASURED = [resolve(name) for name, _ in COLUMNS if runs_here(resolve(name))]
NUMPY_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2", "asinh": "arcsinh",
               "acosh": "arccosh", "atanh": "arctanh", "round": "rint", "pow": "power"}  # fmt: skip


class Compiled:
    """All functions for one target, lane type and width, each over whole arrays with a masked tail."""

    def __init__(self, target: Target, element: str, lanes: int = 0, inline: bool | None = None) -> None:
        self.element = element
        self.lanes = lanes or target.vector_bytes // np.dtype(DTYPES[element]).itemsize
        module = Module(target)
        for function in vmath.FUNCTIONS.values():
            self._kernel(module, function, inline)
        self.code = jit.compile_and_load(module.text(), target)

    def _kernel(self, module: Module, function: vmath.MathFunction, inline: bool | None) -> None:
        params = [("ptr", f"x{i}") for i in range(function.operands)]
        f = module.function(f"all_{function.name}", [*params, ("ptr", "y"), ("i64", "n")])
        *sources, out, n = f.args
        type_ = vector(self.element, self.lanes)

        def body(i: Any, carried: list[Value], f: Function = f) -> None:
            mask = f.lanes(f.sub(n, i), self.lanes)
            operands = [f.masked_load(type_, f.gep(x, i, self.element), mask) for x in sources]
            y = vmath.apply(f, function.name, *operands, inline=inline)
            f.masked_store(y, f.gep(out, i, self.element), mask)

        f.loop(0, n, self.lanes, [], body)

    def __call__(self, name: str, *operands: Any) -> Any:
        xs = [np.ascontiguousarray(x, DTYPES[self.element]) for x in operands]
        y = np.empty_like(xs[0])
        pointers = [ctypes.c_void_p] * (len(xs) + 1)
        native = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)(self.code.address(f"all_{name}"))
        native(*[x.ctypes.data for x in xs], y.ctypes.data, y.size)
        return y


@functools.cache
def compiled(target: Target, element: str, lanes: int = 0) -> Compiled:
    return Compiled(target, element, lanes)


def special_values(dtype: Any) -> Any:
    """Numbers where functions have poles, jumps, limits or lost signs."""
    facts = np.finfo(dtype)
    edges = [
        facts.max,
        facts.tiny,
        facts.smallest_subnormal,
        facts.eps,
        np.inf,
        0.0,
        0.5,
        1.0,
        1.5,
        2.0,
        3.0,
        1e4,
    ]
    return np.array([*edges, *(-x for x in edges), np.nan], dtype)


def samples(element: str, count: int = 40_000) -> Any:
    """Every exponent evenly, the usual ranges densely, and the special values."""
    dtype = DTYPES[element]
    word = np.uint32 if element == "float" else np.uint64
    top = int(np.array(np.finfo(dtype).max).view(word)[()])
    bits = np.array([top * i // (count - 1) for i in range(count)], word).view(dtype)
    limit = 110.0 if element == "float" else 760.0
    ranges = [(-30, 30), (0.4, 1.6), (-1.01, 1.01), (-limit, limit), (-1e5, 1e5)]
    dense = [np.linspace(low, high, count) for low, high in ranges]
    return np.concatenate([special_values(dtype), bits, -bits, np.concatenate(dense).astype(dtype)])


def pairs(element: str) -> tuple[Any, Any]:
    """Operands of functions of two: special values crossed, random exponents, ordinary sizes."""
    rng = np.random.default_rng(7)
    dtype = DTYPES[element]
    special, x = special_values(dtype), samples(element)
    first = [np.repeat(special, special.size), rng.permutation(x), np.exp(rng.uniform(-8, 8, 200_000))]
    second = [np.tile(special, special.size), rng.permutation(x), rng.uniform(-20, 20, 200_000)]
    return np.concatenate(first).astype(dtype), np.concatenate(second).astype(dtype)


@functools.cache
def operands(name: str, element: str) -> tuple[Any, ...]:
    return pairs(element) if vmath.FUNCTIONS[name].operands == 2 else (samples(element),)


# ---- references


def _erf_long(x: Any) -> Any:
    """erf in long double for |x| <= 1: a series of positive terms."""
    total = term = x.copy()
    for n in range(1, 40):
        term = term * 2 * x * x / (2 * n + 1)
        total = total + term
    return (
        total * np.exp(-x * x) * 2 / np.sqrt(np.longdouble(math.pi) + np.longdouble(1.2246467991473532e-16))
    )


def _erfc_long(x: Any) -> Any:
    """erfc in long double for x >= 1: a continued fraction, and exp(-x^2) with x^2 in two parts."""
    below = x.copy()
    for n in range(500, 0, -1):
        below = x + n / (2 * below)
    high = x.astype(np.float32).astype(np.longdouble)
    square = high * high
    rest = (x - high) * (x + high)
    root_pi = np.sqrt(np.longdouble(math.pi) + np.longdouble(1.2246467991473532e-16))
    return np.exp(-square) * np.exp(-rest) / (below * root_pi)


def _erfc_right(a: Any) -> Any:
    """erfc of a >= 0 in long double; NaN stays."""
    result = np.where(np.isnan(a), a, np.longdouble(0))
    near, far = a < 1, (a >= 1) & (a < 30)
    result[near] = 1 - _erf_long(a[near])
    result[far] = _erfc_long(a[far])
    return result


def _erf(x: Any) -> Any:
    if x.dtype == np.float64:  # operands were f32: the C library is far more accurate than needed
        return np.array([math.erf(v) for v in x])
    a = np.abs(x)
    result = 1 - _erfc_right(a)
    result[a < 1] = _erf_long(a[a < 1])
    return np.copysign(result, x)


def _erfc(x: Any) -> Any:
    if x.dtype == np.float64:
        return np.array([math.erfc(v) for v in x])
    right = _erfc_right(np.abs(x))
    return np.where(x < 0, 2 - right, right)


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(np.signbit(x), e, 1) / (1 + e)


REFERENCES: dict[str, Callable[..., Any]] = {
    "erf": _erf, "erfc": _erfc, "sigmoid": _sigmoid, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


def evaluate(name: str, *xs: Any) -> Any:
    """The function computed with more precision than its operands have: f64 for f32, long double for f64."""
    wide = np.float64 if xs[0].dtype == np.float32 else np.longdouble
    function = REFERENCES.get(name) or getattr(np, NUMPY_NAMES.get(name, name))
    with np.errstate(all="ignore"):
        return function(*[x.astype(wide) for x in xs])


@functools.cache
def reference(name: str, element: str) -> Any:
    return evaluate(name, *operands(name, element))


def errors(have: Any, want: Any) -> Any:
    """Distance in units of the last place; a wrong NaN, infinity or sign of zero is infinitely far."""
    with np.errstate(all="ignore"):
        rounded = want.astype(have.dtype)
        distance = np.abs(have.astype(np.longdouble) - want.astype(np.longdouble))
        ulps = distance / np.spacing(np.abs(rounded)).astype(np.longdouble)
    special = ~np.isfinite(rounded) | ~np.isfinite(have)
    equal = (have == rounded) | (np.isnan(have) & np.isnan(rounded))
    lost_sign = (have == 0) & (rounded == 0) & (np.signbit(have) != np.signbit(rounded))
    return np.where(lost_sign | (special & ~equal), np.inf, np.where(special, 0, ulps)).astype(np.float64)


@functools.cache
def largest_error(target: Target, name: str, element: str) -> tuple[float, tuple[float, ...]]:
    """(the largest error in ulp, the operands where it is)."""
    xs = operands(name, element)
    found = errors(compiled(target, element)(name, *xs), reference(name, element))
    worst = int(np.argmax(found))
    return float(found[worst]), tuple(float(x[worst]) for x in xs)


# ---- the page

PAGE = """# Vectorised math: measured errors

Largest error of `rlx.codegen.native.vmath` in units of the last place, over every exponent, the usual ranges
densely and all special values (about 280,000 operands per function). f32 is compared with f64, f64 with
80-bit long double. NaN, infinities, denormals and signed zeros agree with NumPy everywhere. 0.5 is correct
rounding. The page is written by `pytest tests/backend/native/test_vmath.py --update-golden`; the test
holds it to what it measures.

"""


def page(measured: Callable[[str, str, str], float]) -> str:
    """The table as Markdown; `measured` gives the error for (target name, function, lane type)."""
    heads = [f"{dtype} {title}" for dtype in ("f32", "f64") for _, title in COLUMNS]
    lines = ["| function | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in vmath.FUNCTIONS:
        cells = [measured(target, name, element) for element in DTYPES for target, _ in COLUMNS]
        lines.append(
            f"| {name} | " + " | ".join(f"{math.ceil(cell * 100) / 100:.2f}" for cell in cells) + " |"
        )
    return PAGE + "\n".join(lines) + "\n"


def read_page(text: str) -> dict[tuple[str, str, str], float]:
    """The numbers of the page by (target name, function, lane type)."""
    keys: Sequence[tuple[str, str]] = [(target, element) for element in DTYPES for target, _ in COLUMNS]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in vmath.FUNCTIONS:
            for (target, element), cell in zip(keys, cells[1:], strict=True):
                found[target, cells[0], element] = float(cell)
    return found
