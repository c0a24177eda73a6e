"""Casts to and from storage-only dtypes, natively, against the reference on every kind of float."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.codegen.native.storage import NAMES
from rlx.ir.dtype import convert, dtype

EDGES = [
    0.0,
    np.inf,
    np.nan,
    448,
    449,
    464,
    465,
    480,
    57344,
    61440,
    61441,
    5,
    6,
    7,
    0.25,
    0.75,
    1.25,
    240,
    248,
]
EDGES += [2.0**-127, 1.5 * 2.0**-127, 1.4 * 2.0**-127, 2.0**-128]


def floats() -> np.ndarray:
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(20_000) * 10 ** rng.uniform(-8, 6, 20_000)).astype(np.float32)
    edges = np.array(EDGES, np.float32)
    return np.concatenate([any_bits, near, edges, -edges])


@pytest.mark.parametrize("saturate", [None, True, False])
@pytest.mark.parametrize("to", NAMES)
def test_rounding_is_the_reference(to: str, saturate: bool | None) -> None:
    x = floats()
    g = rlx.Graph("encode")
    g.output("y", rlx.ops.cast(g.input("x", ("n",), "f32"), to, saturate))
    program = rlx.compile(g)
    assert program.stats["host_thunks"] == []
    got, want = program(x).astype(np.float32), convert(x, to, saturate=saturate).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@pytest.mark.parametrize("source", NAMES)
def test_every_code_decodes(source: str) -> None:
    d = dtype(source)
    codes = np.arange(1 << min(d.bits, 8), dtype=np.uint8).view(d.np)
    g = rlx.Graph("decode")
    g.output("y", rlx.ops.cast(g.input("x", ("n",), source), "f32"))
    np.testing.assert_array_equal(rlx.compile(g)(codes), codes.astype(np.float32))
