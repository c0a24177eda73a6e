"""Reduction kernels against NumPy: special values, any alignment and count, in place, many destinations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import dist_cases as cases
from rlx.codegen.native.jit import assembly, compile_object
from rlx.dist import ReduceKind
from rlx.dist.native import reduce as module
from rlx.dist.native import sync
from rlx.dist.native.copies import copy_bytes
from rlx.dist.native.reduce import emit, kernel
from rlx.dist.transport import address_of
from rlx.errors import DTypeError
from rlx.ir.dtype import dtype
from rlx.target.cpu import resolve


@given(
    st.sampled_from(cases.ALL),
    st.sampled_from(ReduceKind),
    st.integers(1, 9),
    st.integers(0, 700),
    st.integers(0, 3),
)
def test_kernels_equal_numpy(name: str, kind: ReduceKind, ranks: int, count: int, shift: int) -> None:
    if kind not in cases.kinds_of(name):
        with pytest.raises(DTypeError):
            kernel(name, kind)
        return
    arrays = [cases.values(name, count + shift, rank)[shift:] for rank in range(ranks)]
    want = cases.reduced(arrays, kind)
    mine = arrays[0].copy()
    other = np.empty_like(mine)
    sources = [address_of(mine), *(address_of(array) for array in arrays[1:])]
    kernel(name, kind)(sources, [address_of(mine), address_of(other)], count)
    assert cases.same(mine, want)
    assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", cases.NATIVE)
def test_streaming_stores_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1000
    arrays = [cases.values(name, count, rank).copy() for rank in range(3)]
    raw = np.zeros(count * 8 + 64, np.uint8)
    start = -address_of(raw) % 64
    aligned = raw[start : start + count * dtype(name).itemsize].view(dtype(name).np)
    plain = np.zeros_like(aligned)
    reduce = kernel(name, ReduceKind.SUM)
    reduce([address_of(a) for a in arrays], [address_of(plain)], count)
    monkeypatch.setattr(module, "STREAM_BYTES", 0)
    reduce([address_of(a) for a in arrays], [address_of(aligned)], count)
    assert plain.tobytes() == aligned.tobytes()


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_compile_for_every_target(target: str) -> None:
    for name, kind in (("f16", ReduceKind.MEAN), ("u64", ReduceKind.MEAN), ("bf16", ReduceKind.MAX)):
        assert compile_object(emit(resolve(target), name, kind, stream=True), resolve(target))


def test_the_barrier_compiles_for_arm_with_acquire_and_release() -> None:
    text = assembly(sync.emit(resolve("aarch64")), resolve("aarch64"))
    assert "ldar" in text and "stlr" in text


def test_nan_and_signed_zero() -> None:
    a, b = np.array([np.nan, 1, -0.0, 0.0]), np.array([1, np.nan, 0.0, -0.0])
    for kind in (ReduceKind.MAX, ReduceKind.MIN):
        out = np.empty(4)
        kernel("f64", kind)([address_of(a), address_of(b)], [address_of(out)], 4)
        assert np.isnan(out[:2]).all()
        assert np.signbit(out[2:]).tolist() == [True, False]  # of equals the earlier rank's value stays


def test_the_mean_of_integers_is_exact() -> None:
    top = np.iinfo(np.int64).max
    a, b, c = np.array([top, -5, 1]), np.array([top, 2, 1]), np.array([top - 1, 0, 0])
    out = np.empty(3, np.int64)
    kernel("i64", ReduceKind.MEAN)([address_of(x) for x in (a, b, c)], [address_of(out)], 3)
    assert out.tolist() == [top - 1, -1, 0]


@given(st.integers(0, 9000), st.integers(0, 70), st.integers(0, 70), st.sampled_from([0, 1 << 30]))
def test_copies(count: int, source: int, destination: int, total: int) -> None:
    a = np.arange(9200).astype(np.uint8)
    b = np.zeros(9200, np.uint8)
    copy_bytes(address_of(b) + destination, address_of(a) + source, count, total)
    assert (b[destination : destination + count] == a[source : source + count]).all()
    assert not b[:destination].any() and not b[destination + count :].any()


@pytest.mark.parametrize("shift", [-5000, -64, -1, 0, 1, 64, 5000])
def test_a_copy_within_one_array(shift: int) -> None:
    a = np.arange(20_000).astype(np.uint8)
    expected = a[7000:13_000].copy()
    copy_bytes(address_of(a) + 7000 + shift, address_of(a) + 7000, 6000)
    assert (a[7000 + shift : 13_000 + shift] == expected).all()
