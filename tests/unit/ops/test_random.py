"""Random numbers: published known answers of Philox, distributions, keys, and token sampling."""

from __future__ import annotations

import numpy as np
import pytest

from rlx import Graph, compile, ops
from rlx.errors import OpAttributeError, TypeMismatchError
from rlx.ir.dtype import dtype
from rlx.ir.op import get_op, run_rule
from rlx.ops.math.random import philox
from rlx.plan.phase import Phase, derive_phases
from rlx.reference.forms import run_form
from rlx.reference.interpreter import evaluate

# The vectors "philox4x32 10" of kat_vectors in Random123, the library of the generator's authors:
# four counter words, two key words, four words of the answer.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line: str) -> None:
    words = [np.uint32(int(w, 16)) for w in line.split()]
    counter, key, want = words[:4], np.array(words[4:6]), words[6:]
    assert [int(w) for w in philox([np.asarray(c) for c in counter], list(key))] == want
    offset = np.asarray(int(counter[0]) | int(counter[1]) << 32, np.uint64)
    stream = int(counter[2]) | int(counter[3]) << 32
    assert ops.random_bits(key, 4, offset=offset, stream=stream).tolist() == want
    g = Graph()
    node = g.input("key", (2,), "u32"), g.input("offset", (), "u64")
    bits = ops.random_bits(node[0], 4, offset=node[1], stream=stream)
    form = run_rule(bits.op, "lower", *(n.type for n in node), node=bits)
    assert run_form(form, [key, offset], {}, (4,)).tolist() == want


def test_native_code_draws_the_same_numbers() -> None:
    g = Graph()
    key = g.input("key", (2,), "u32")
    g.output("bits", ops.random_bits(key, (3, 7)))
    g.output("wide", ops.random_bits(key, 5, "u64"))
    g.output("uniform", ops.uniform(key, (2, 9), -1.0, 3.0))
    g.output("normal", ops.normal(key, 33))
    feed = {"key": ops.random_key(12345678901234567)}
    program = compile(g)
    assert program.stats["host_thunks"] == []
    got, want = program.run(feed), evaluate(g, feed)
    for name in ("bits", "wide", "uniform"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_allclose(got["normal"], want["normal"], rtol=1e-5, atol=1e-6)


def test_a_shorter_draw_is_the_beginning_of_a_longer_one() -> None:
    key = ops.random_key(3)
    np.testing.assert_array_equal(ops.random_bits(key, 100)[:7], ops.random_bits(key, 7))
    np.testing.assert_array_equal(ops.uniform(key, (4, 5)).reshape(-1), ops.uniform(key, 20))


def test_keys_split_and_fold_into_different_ones() -> None:
    key = ops.random_key(0)
    keys = [*ops.random_split(key, 50), *(ops.random_fold(key, i) for i in range(50)), key]
    assert len({tuple(k) for k in keys}) == 101
    drawn = np.stack([ops.uniform(k, 200) for k in keys])
    correlation = np.corrcoef(drawn) - np.eye(101)
    assert np.abs(correlation).max() < 0.35  # 5 deviations of the coefficient of 200 independent pairs


def test_a_seed_may_be_a_node() -> None:
    g = Graph()
    g.output("key", ops.random_key(g.input("seed", (), "i64")))
    for seed in (0, 7, 2**40 + 5, -1):
        got = evaluate(g, {"seed": np.asarray(seed)})["key"]
        np.testing.assert_array_equal(got, ops.random_key(seed))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_uniform_fills_its_interval_evenly(kind: str) -> None:
    drawn = ops.uniform(ops.random_key(1), 20000, dtype=kind)
    assert dtype(drawn.dtype).name == kind
    x = drawn.astype(np.float64)
    assert x.min() >= 0 and x.max() < 1
    counts = np.histogram(x, 16, (0, 1))[0]
    assert ((counts - 1250) ** 2 / 1250).sum() < 45  # chi squared of 15 degrees: 1e-4 lies beyond
    y = ops.uniform(ops.random_key(1), 20000, 1.0, 1.01, dtype=kind).astype(np.float64)
    assert y.min() >= 1.0 and y.max() < 1.01


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_normal_has_the_moments_of_a_normal(kind: str) -> None:
    x = ops.normal(ops.random_key(2), 40000, 1.0, 2.0, dtype=kind).astype(np.float64)
    z = (x - 1) / 2
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02
    assert abs((z**3).mean()) < 0.06 and abs((z**4).mean() - 3) < 0.15


def test_integers_booleans_and_masks() -> None:
    key = ops.random_key(4)
    x = ops.randint(key, 30000, -2, 3, "i32")
    assert x.dtype == np.int32 and np.bincount(x + 2).shape == (5,)
    assert np.abs(np.bincount(x + 2) / 6000 - 1).max() < 0.07
    p = np.broadcast_to(np.array([0.1, 0.5, 0.9], np.float32), (5000, 3))
    np.testing.assert_allclose(ops.bernoulli(key, p).mean(0), p[0], atol=0.03)
    mask = ops.dropout_mask(key, (100, 100), 0.3)
    assert abs(mask.mean() - 0.7) < 0.02


def test_tokens_follow_softmax_within_top_k_and_top_p() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    many = np.broadcast_to(logits, (20000, 4))

    def shares(**how: float) -> np.ndarray:
        return np.bincount(ops.sample_tokens(ops.random_key(9), many, **how), minlength=4) / 20000

    np.testing.assert_allclose(shares(), [0.5, 0.25, 0.15, 0.1], atol=0.015)
    np.testing.assert_allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.015)
    np.testing.assert_allclose(shares(top_p=0.8), np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)
    np.testing.assert_allclose(shares(top_p=0.5), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(temperature=0.0), [1, 0, 0, 0])
    sharp = np.array([0.25, 0.0625, 0.0225, 0.01])
    np.testing.assert_allclose(shares(temperature=0.5), sharp / sharp.sum(), atol=0.015)


def test_sampling_begins_the_epilogue() -> None:
    g = Graph()
    key, x, w = g.input("key", (2,), "u32"), g.input("x", (1, 4), "f32"), g.param("w", (4, 9), "f32")
    token = ops.sample_tokens(key, x @ w, top_k=3)
    g.output("token", token)
    assert derive_phases(g).get(token.id) is Phase.EPILOGUE


def test_refusals() -> None:
    with pytest.raises(
        TypeMismatchError, match=r"a key is u32\[2\], got i64\[\]; make one with rlx.ops.random_key"
    ):
        ops.uniform(np.asarray(3), 4)
    with pytest.raises(OpAttributeError, match=r"randint: \[3, 3\) is empty or does not fit i64"):
        ops.randint(ops.random_key(0), 4, 3, 3)
    with pytest.raises(OpAttributeError, match="top_k is 9; it must be 1 to 3"):
        ops.sample_tokens(ops.random_key(0), np.zeros(3, np.float32), top_k=9)
    assert get_op("sample_tokens").selects
