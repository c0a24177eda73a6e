"""Casts to 16-bit floats round once, and remainders not at all, on every target that this machine runs."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ir.dtype import convert
from rlx.ir.dtype import dtype as find
from rlx.ir.graph import Graph
from rlx.ops.math.elementwise import cast, fmod
from rlx.target.cpu import Target, runs_here, targets

MACHINES = [target for target in targets() if runs_here(target)]
SOURCES = ("f64", "f32", "f16", "bf16", "i64", "u64", "i32", "u32", "i16", "u16", "i8", "u8", "bool")
DRAWN = 2000


def near_ties(source: str) -> np.ndarray:
    """Values of every size, and such as lie a little beside the middle of two 16-bit floats."""
    rng, d = np.random.default_rng(7), find(source)
    if d.is_bool:
        return np.array([False, True])
    if d.is_float:
        bits = rng.integers(0, 1 << d.bits, DRAWN, dtype=np.uint64).astype(f"u{d.itemsize}").view(d.np)
        tie = (1 + rng.integers(0, 1 << 12, DRAWN) * 2.0**-12) * 2.0 ** rng.integers(-30, 18, DRAWN)
        beside = tie * (1 + rng.choice([-1, 0, 1], DRAWN) * 2.0 ** -rng.integers(13, 52, DRAWN))
        ends = [1 + 2**-11 + 2**-40, 65519.999999, 65520.0, 2**-25 + 2**-60, 3.396e38, -0.0, np.inf, np.nan]
        with np.errstate(all="ignore"):
            return np.concatenate([bits, convert(beside, d), convert(-beside, d), convert(np.array(ends), d)])
    low, high = int(d.min_value), int(d.max_value)
    spread = [int(rng.integers(1, 1 << 10)) << int(rng.integers(0, d.bits)) for _ in range(DRAWN)]
    beside = [sign * (v + int(rng.integers(-1, 2))) for v in spread for sign in (1, -1)]
    return np.array([low, high, *(v for v in beside if low <= v <= high)], d.np)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit by bit, but that one NaN is as good as another."""
    assert got.dtype == want.dtype
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(got, want)
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
@pytest.mark.parametrize("source", SOURCES)
def test_casts_round_once(source: str, target: Target) -> None:
    x = near_ties(source)
    g = Graph("casts")
    value = g.input("x", x.shape, source)
    with g.building():
        g.set_outputs({to: cast(value, dtype=to) for to in ("f16", "bf16", "f32", "f64")})
    with np.errstate(all="ignore"):
        got = rlx.compile(g, target=target.name).run({"x": x})
        for to, result in got.items():
            same(result, convert(x, to))


@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
def test_f64_to_f16_is_numpys(target: Target) -> None:
    x = np.array([1 + 2**-11 + 2**-40, 1 + 2**-11, 1 + 3 * 2**-11 - 2**-40])
    g = Graph("cast")
    value = g.input("x", x.shape, "f64")
    with g.building():
        g.output("y", cast(value, dtype="f16"))
    assert rlx.compile(g, target=target.name).run({"x": x})["y"].tolist() == x.astype(np.float16).tolist()
    assert x.astype(np.float16).tolist() == [1 + 2**-10, 1.0, 1 + 2**-10]


@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_remainders_are_exact(dtype: type, target: Target) -> None:
    rng, info = np.random.default_rng(3), np.finfo(dtype)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3, info.tiny, info.smallest_subnormal, info.max], dtype
    )
    pairs = np.array([(a, b) for a in special for b in special], dtype)
    drawn = rng.integers(0, 1 << 32, (DRAWN, 2 * info.bits // 32), dtype=np.uint32).view(dtype)
    with np.errstate(all="ignore"):
        multiple = drawn[:, 0] * np.exp2(-rng.integers(0, 40, DRAWN)).astype(dtype)
        x = np.concatenate([pairs[:, 0], drawn[:, 0], drawn[:, 0]])
        y = np.concatenate([pairs[:, 1], drawn[:, 1], multiple])
        want = np.fmod(x, y)
    g = Graph("remainders")
    operands = [g.input(name, x.shape, find(x.dtype)) for name in "xy"]
    with g.building():
        g.output("rest", fmod(*operands))
    same(rlx.compile(g, target=target.name).run({"x": x, "y": y})["rest"], want)
