"""The attention kernel against the definition in f64: sizes, masks, windows, layouts, targets, threads."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import (
    FILLER,
    Array,
    Guarded,
    Kernel,
    assert_f32_targets_stand_for_all,
    every_f32_target,
    every_target,
)
from machines import executable
from rlx import ops
from rlx.codegen.cpu.attention.flash import Access, AttentionSpec, emit_attention
from rlx.codegen.cpu.frame import Slot
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Module
from rlx.ir.dim import evaluate, sym
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate as reference
from rlx.target.cpu import Target, resolve

HOST = resolve("host")
QUERIES, KEYS = sym("s"), sym("t")
BF16_UNIT = 2.0**-8


@dataclass(frozen=True)
class Case:
    """What one kernel is made for; sizes of queries and keys come at run time."""

    depth: int = 16
    value_depth: int = 16
    heads: int = 2
    groups: int = 1  # query heads that share a key head
    heads_inside: bool = False  # [batch, seq, heads, dim], as a projection writes it
    mask: str = ""  # "bool" or "add"
    mask_per_head: bool = False
    causal: bool = False
    offset: Any = 0
    left: int = -1
    right: int = -1
    empty_is_zero: bool = True
    dtype: str = "f32"  # of queries, keys and values
    result: str = "f32"
    scale: float = 0.0  # 0: one over the root of depth
    sinks: bool = False

    @property
    def factor(self) -> float:
        return self.scale or 1 / math.sqrt(self.depth)

    def shape(self, heads: int, rows: int, columns: int) -> tuple[int, ...]:
        return (2, rows, heads, columns) if self.heads_inside else (2, heads, rows, columns)

    def access(self, number: int, heads: int, rows: Any, columns: int, shared: bool) -> Access:
        """Batch axes are (batch, key head, query head of the group)."""
        group = 0 if shared else columns if self.heads_inside else rows * columns
        per_head = columns if self.heads_inside else rows * columns
        step = per_head if shared else per_head * self.groups
        row = heads * columns if self.heads_inside else columns
        return Access(number, (rows * heads * columns, step, group), row)

    def spec(self) -> AttentionSpec:
        total = self.heads * self.groups
        mask = None
        if self.mask:
            own = KEYS * QUERIES
            steps = (total * own, self.groups * own, own) if self.mask_per_head else (own, 0, 0)
            mask = Access(3, steps, KEYS)
        return AttentionSpec(
            (2, self.heads, self.groups),
            QUERIES,
            KEYS,
            self.depth,
            self.value_depth,
            self.factor,
            self.access(0, total, QUERIES, self.depth, False),
            self.access(1, self.heads, KEYS, self.depth, True),
            self.access(2, self.heads, KEYS, self.value_depth, True),
            self.access(3 + bool(self.mask) + self.sinks, total, QUERIES, self.value_depth, False),
            mask=mask,
            sink=Access(3 + bool(self.mask), (0, self.groups, 1), 0, 0) if self.sinks else None,
            mask_kind=self.mask,
            causal=self.causal,
            offset=self.offset,
            left=self.left,
            right=self.right,
            empty_is_zero=self.empty_is_zero,
        )


def write(target: Target, case: Case) -> tuple[str, Any]:
    """LLVM IR of a kernel, and what is to know about it."""
    module = Module(target)
    kinds = [case.dtype] * 3 + {"": [], "bool": ["bool"], "add": ["f32"]}[case.mask] + ["f32"] * case.sinks
    slots = [Slot(dtype(k), (1,)) for k in [*kinds, case.result]]
    made = emit_attention(module, "kernel", case.spec(), slots[:-1], slots[-1:])
    return module.text(), made


@functools.cache
def build(target: Target, case: Case) -> tuple[Kernel, tuple[Any, ...]]:
    text, made = write(target, case)
    code = jit.compile_and_load(text, target)
    return Kernel(code, tuple(map(str, made.dims)), made.scratch_per_thread), made.dims


def make_mask(case: Case, queries: int, keys: int, rng: np.random.Generator) -> list[Array]:
    if not case.mask:
        return []
    shape = (2, case.heads * case.groups if case.mask_per_head else 1, queries, keys)
    if case.mask == "bool":
        return [rng.random(shape) < 0.7]
    return [np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape)).astype(np.float32)]


def make_sinks(case: Case) -> list[Array]:
    """Of neighbouring heads far below, among, and far above the scores."""
    return [np.resize(np.array([0.5, -np.inf, 3, 200], np.float32), case.heads * case.groups)] * case.sinks


def wanted(case: Case, q: Array, k: Array, v: Array, mask: list[Array], offset: int) -> tuple[Array, Array]:
    """[batch, heads, seq, dim] in f64; and the same of magnitudes of values."""
    if case.heads_inside:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q, k, v = (x.astype(np.float64) for x in (q, *(np.repeat(x, case.groups, axis=1) for x in (k, v))))
    scores = q @ k.swapaxes(2, 3) * case.factor
    for m in mask:
        scores = np.where(m, scores, -np.inf) if m.dtype == bool else scores + m
    ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - offset
    right = 0 if case.causal else case.right
    hidden = (right >= 0) & (ahead > right) | (case.left >= 0) & (ahead < -case.left)
    scores = np.where(hidden, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = p.sum(-1, keepdims=True)
        whole = total
        for sink in make_sinks(case):
            whole = total + np.exp(
                sink[:, None, None].astype(np.float64) - np.where(np.isfinite(top), top, 0)
            )
        out, size = (p @ v) / whole, (p @ np.abs(v)) / whole
    return np.where(total == 0, 0.0 if case.empty_is_zero or not k.shape[2] else np.nan, out), size


def run(target: Target, case: Case, queries: int, keys: int, threads: int = 1, offset: int = 0) -> None:
    """Inputs end where memory ends; every output is written, and nothing beside."""
    rng = np.random.default_rng(queries * 1000 + keys)
    guard, total = Guarded(), case.heads * case.groups
    shapes = [
        case.shape(total, queries, case.depth),
        case.shape(case.heads, keys, case.depth),
        case.shape(case.heads, keys, case.value_depth),
    ]
    narrow = dtype(case.dtype).np
    q, k, v = (rng.standard_normal(shape).astype(np.float32).astype(narrow) for shape in shapes)
    mask = make_mask(case, queries, keys, rng)
    result = dtype(case.result).np
    o = guard.array(case.shape(total, queries, case.value_depth), result, at_end=True)
    o[...] = FILLER
    kernel, dims = build(target, case)
    binding = {"s": queries, "t": keys, "offset": offset}
    sizes = {str(d): evaluate(d, binding) for d in dims}
    kernel.run(
        [*(guard.copy(x, at_end=True) for x in (q, k, v, *mask, *make_sinks(case))), o], sizes, threads
    )
    got = o.swapaxes(1, 2) if case.heads_inside else o
    want, size = wanted(case, q, k, v, mask, offset if not isinstance(case.offset, int) else case.offset)
    bound = 2e-5 * np.abs(want) + 2e-6
    if case.dtype == "bf16":
        bound = bound + BF16_UNIT * np.nan_to_num(size)  # weights are rounded
    if case.result != "f32":
        bound = bound + BF16_UNIT * np.abs(want)
    hollow = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), hollow)
    assert (np.abs(got.astype(np.float64) - want) <= bound)[~hollow].all()


SIZES = [(1, 1), (1, 130), (5, 7), (16, 16), (17, 33), (48, 128), (49, 129), (100, 300)]


@every_f32_target
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_sizes(target: Target, queries: int, keys: int) -> None:
    run(target, Case(), queries, keys)


@every_f32_target
@pytest.mark.parametrize(("depth", "value_depth"), [(1, 1), (7, 5), (32, 64), (64, 17), (80, 80)])
def test_head_sizes(target: Target, depth: int, value_depth: int) -> None:
    run(target, Case(depth=depth, value_depth=value_depth), 21, 37)


@every_f32_target
@pytest.mark.parametrize(
    "case",
    [
        Case(mask="bool"),
        Case(mask="add"),
        Case(mask="bool", mask_per_head=True, groups=2),
        Case(mask="add", mask_per_head=True, causal=True),
        Case(causal=True),
        Case(causal=True, offset=sym("offset")),
        Case(causal=True, left=5),
        Case(left=3, right=4),
        Case(left=200, right=0),
        Case(right=2, mask="bool"),
        Case(heads=3, groups=2),
        Case(heads_inside=True, groups=2, causal=True),
        Case(heads_inside=True, depth=24, value_depth=9, mask="add"),
        Case(heads=2, groups=2, sinks=True),
        Case(groups=2, sinks=True, causal=True, left=5),
        Case(heads=4, sinks=True, mask="add"),
        Case(heads=4, sinks=True, mask="bool", mask_per_head=True),
    ],
    ids=str,
)
def test_masks_windows_and_layouts(target: Target, case: Case) -> None:
    for queries, keys in ((1, 5), (19, 19), (50, 140)):
        run(target, case, queries, keys, offset=3)


@every_f32_target
@pytest.mark.parametrize(
    "case",
    [
        Case(depth=64, value_depth=64),
        Case(depth=32, value_depth=64, causal=True, offset=sym("offset")),
        Case(depth=64, value_depth=16, heads_inside=True, groups=3),
        Case(depth=16, value_depth=32, left=9, right=20),
        Case(depth=16, value_depth=16, causal=True, offset=-2, empty_is_zero=False),
        Case(depth=32, value_depth=32, mask="bool", groups=2, empty_is_zero=False),
        Case(depth=32, value_depth=16, mask="add", mask_per_head=True, left=40),
        Case(depth=64, value_depth=64, groups=2, sinks=True, causal=True, offset=sym("offset")),
        Case(depth=16, value_depth=32, heads=4, sinks=True, mask="add"),
    ],
    ids=str,
)
def test_few_queries(target: Target, case: Case) -> None:
    """Decoding: rows instead of blocks, with any number of keys left over."""
    for queries in (1, 2, 4, 5):
        for keys in (0, 1, 15, 16, 17, 33, 100):
            run(target, case, queries, keys, offset=30, threads=1 + keys % 2)


@pytest.mark.parametrize("mask", ["", "bool", "add"])
def test_code_of_f32_needs_no_instructions_for_narrow_types(mask: str) -> None:
    for depth in (17, 64):
        case = Case(depth=depth, value_depth=depth, mask=mask, causal=True)
        assert_f32_targets_stand_for_all(lambda target, case=case: write(target, case)[0])


PAIRS = [t for t in executable() if t.has_bf16]
pairs_target = pytest.mark.parametrize("target", PAIRS, ids=lambda t: t.name)


@every_target
@pytest.mark.parametrize("narrow", ["bf16", "f16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(depth=7, value_depth=17, mask="add"),
        Case(depth=64, value_depth=32, causal=True, heads_inside=True, groups=2, result="bf16"),
        Case(depth=16, value_depth=16, groups=2, sinks=True, left=40),
        Case(depth=64, value_depth=16, heads=4, sinks=True, mask="add"),
    ],
    ids=str,
)
def test_operands_of_16_bits(target: Target, case: Case, narrow: str) -> None:
    for queries, keys in ((1, 5), (3, 20), (50, 141)):
        run(target, replace(case, dtype=narrow), queries, keys)


@pairs_target
@pytest.mark.parametrize("result", ["f32", "bf16"])
@pytest.mark.parametrize(("queries", "keys"), [*SIZES, (7, 0), (48, 127), (33, 255)])
def test_pairs_of_bf16(target: Target, queries: int, keys: int, result: str) -> None:
    run(target, Case(dtype="bf16", result=result), queries, keys)


@pairs_target
@pytest.mark.parametrize(
    ("depth", "value_depth"), [(1, 1), (2, 3), (7, 5), (31, 33), (32, 64), (64, 17), (80, 80)]
)
def test_pairs_of_any_head_size(target: Target, depth: int, value_depth: int) -> None:
    for queries, keys in ((3, 20), (21, 37), (50, 131)):
        run(target, Case(depth=depth, value_depth=value_depth, dtype="bf16", result="bf16"), queries, keys)


@pairs_target
@pytest.mark.parametrize(
    "case",
    [
        Case(mask="bool", mask_per_head=True, groups=2),
        Case(mask="add", mask_per_head=True, causal=True),
        Case(causal=True, offset=sym("offset")),
        Case(left=3, right=4),
        Case(mask="add", scale=-0.5),
        Case(scale=-0.5, causal=True),
        Case(heads_inside=True, groups=2, causal=True, depth=64, value_depth=64),
        Case(heads_inside=True, depth=23, value_depth=9, mask="add"),
        Case(causal=True, offset=-6, empty_is_zero=False),
    ],
    ids=str,
)
def test_pairs_with_masks_and_windows(target: Target, case: Case) -> None:
    for queries, keys in ((1, 5), (19, 19), (50, 141)):
        run(target, replace(case, dtype="bf16"), queries, keys, offset=3)


@every_target
@pytest.mark.parametrize("result", ["bf16", "f16"])
def test_results_are_stored_narrow(target: Target, result: str) -> None:
    for value_depth in (32, 9):
        for queries in (1, 30):
            run(target, Case(depth=32, value_depth=value_depth, result=result), queries, 40)


@every_f32_target
@pytest.mark.parametrize("empty_is_zero", [True, False])
def test_queries_that_see_nothing(target: Target, empty_is_zero: bool) -> None:
    run(target, Case(causal=True, offset=-6, empty_is_zero=empty_is_zero), 20, 20)
    run(target, Case(empty_is_zero=empty_is_zero), 3, 0)


def test_a_row_of_hidden_scores_is_what_its_softmax_says() -> None:
    """Written out, a softmax of nothing but -inf is NaN; `attention` promises zeros."""
    g = Graph("rows")
    q, k, v = (g.input(n, (1, 2, 40, 16), "f32") for n in "qkv")
    mask = g.input("mask", (40, 40), "f32")
    g.output("plain", ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)) + mask, axis=-1) @ v)
    g.output("ours", ops.attention(q, k, v, ops.reshape(mask, (1, 1, 40, 40)), scale=1.0))
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal((1, 2, 40, 16)).astype(np.float32) for n in "qkv"}
    feed["mask"] = np.where(np.arange(40)[:, None] % 3 == 0, -np.inf, np.zeros((40, 40))).astype(np.float32)
    got, want = rlx.compile(g).run(feed), reference(g, feed)
    assert np.isnan(want["plain"][:, :, ::3]).all() and (want["ours"][:, :, ::3] == 0).all()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6)


def test_no_queries() -> None:
    run(HOST, Case(), 0, 5)


def test_bits_do_not_depend_on_threads() -> None:
    """The same graph on one to three threads, with enough heads and queries to share."""
    g = Graph("attend")
    q, k, v = (g.input(n, (2, 3, "s", 32), "f32") for n in "qkv")
    g.output("o", ops.attention(q, k, v, causal=True))
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal((2, 3, 77, 32)).astype(np.float32) for n in "qkv"}
    first, *others = (rlx.compile(g, threads=t).run(feed)["o"].tobytes() for t in (1, 2, 3))
    assert all(other == first for other in others)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_work(threads: int) -> None:
    run(HOST, Case(causal=True), 100, 100, threads=threads)


@pytest.mark.parametrize("seed", range(4))
def test_large_scores_do_not_overflow(seed: int) -> None:
    """Against f64. A score may be off by a few roundings of its products, and its weight by as much."""
    g = Graph("attend")
    q, k, v = (g.input(n, (1, 2, 40, 16), "f32") for n in "qkv")
    g.output("o", ops.attention(q, k, v, scale=1.0))
    rng = np.random.default_rng(seed)
    feed = {n: rng.standard_normal((1, 2, 40, 16)).astype(np.float32) for n in "qkv"}
    feed["q"] *= 1000
    got = rlx.compile(g).run(feed)["o"]
    assert np.isfinite(got).all()
    want, size = wanted(Case(scale=1.0), *(feed[n] for n in "qkv"), [], 0)
    products = np.abs(feed["q"]) @ np.abs(feed["k"]).swapaxes(2, 3)
    assert (np.abs(got - want) <= 4 * 2.0**-24 * products.max(-1, keepdims=True) * size).all()


@pytest.mark.parametrize("mask", [None, "bool", "f32"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 2)}, {"softcap": 5.0}], ids=str)
def test_compiled_attention_is_the_reference(options: dict[str, Any], mask: str | None) -> None:
    """Through the pipeline: grouped heads, run-time lengths, whatever kernel is chosen."""
    g = Graph("attend")
    q, k = g.input("q", (2, 4, "s", 16), "f32"), g.input("k", (2, 2, "t", 16), "f32")
    v = g.input("v", (2, 2, "t", 16), "f32")
    seen = [] if mask is None else [g.input("mask", (2, 1, "s", "t"), mask)]
    g.output("o", ops.attention(q, k, v, *seen, **options))
    program = rlx.compile(g, threads=2)
    for s, t in ((1, 9), (33, 33), (40, 200)):
        rng = np.random.default_rng(s)
        feed = {
            "q": rng.standard_normal((2, 4, s, 16)).astype(np.float32),
            "k": rng.standard_normal((2, 2, t, 16)).astype(np.float32),
            "v": rng.standard_normal((2, 2, t, 16)).astype(np.float32),
        }
        if mask is not None:
            random = rng.standard_normal((2, 1, s, t))
            feed["mask"] = random > -1 if mask == "bool" else random.astype(np.float32)
        np.testing.assert_allclose(program.run(feed)["o"], reference(g, feed)["o"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("keys", [2, 19])
def test_an_infinite_value_of_the_last_key(keys: int, queries: int) -> None:
    """The last key stands in for keys that are not there: it must not count, whatever its value is."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 1, n, 16)).astype(np.float32) for n in (queries, keys, keys))
    v[1, 0, -1, 15] = np.inf
    got = rlx.jit(rlx.ops.attention)(q, k, v)
    want = rlx.ops.attention(q, k, v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.isposinf(got[1, 0, :, 15]).all()


SPLIT = [
    Case(depth=64, value_depth=64),
    Case(depth=32, value_depth=32, causal=True),
    Case(depth=16, value_depth=32, left=150, right=20),
    Case(depth=80, value_depth=80, causal=True, left=37, heads_inside=True, groups=2),
    Case(depth=128, value_depth=128, causal=True, groups=3),
    Case(depth=32, value_depth=16, mask="bool"),
    Case(depth=64, value_depth=32, mask="add", mask_per_head=True, causal=True),
    Case(depth=80, value_depth=128, mask="bool", left=40, groups=2),
    Case(depth=16, value_depth=16, causal=True, scale=-0.5, result="bf16"),
]


def computed(target: Target, case: Case, operands: list[Array], offset: int) -> Array:
    """The kernel's output; the first query stands at key position `offset`."""
    guard, axis = Guarded(), 1 if case.heads_inside else 2
    queries, keys = (x.shape[axis] for x in operands[:2])
    out = guard.array(
        case.shape(case.heads * case.groups, queries, case.value_depth), dtype(case.result).np, at_end=True
    )
    kernel, dims = build(target, case)
    sizes = {str(d): evaluate(d, {"s": queries, "t": keys, "offset": offset}) for d in dims}
    kernel.run([*(guard.copy(x, at_end=True) for x in operands), out], sizes)
    return np.array(out)


@every_target
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_any_split_of_queries_has_the_same_bits(target: Target, case: Case, kind: str) -> None:
    case = replace(case, dtype=kind, offset=sym("offset"))
    rng = np.random.default_rng(0)
    for queries, keys, offset in ((20, 300, 270), (7, 33, 20), (5, 128, 123)):
        heads = case.heads * case.groups
        shapes = [
            case.shape(heads, queries, case.depth),
            case.shape(case.heads, keys, case.depth),
            case.shape(case.heads, keys, case.value_depth),
        ]
        narrow = dtype(kind).np
        q, k, v = (rng.standard_normal(shape).astype(np.float32).astype(narrow) for shape in shapes)
        mask = make_mask(case, queries, keys, rng)
        whole = computed(target, case, [q, k, v, *mask], offset)
        axis, at = 1 if case.heads_inside else 2, 0
        while at < queries:
            end = min(queries, at + int(rng.choice([1, 1, 2, 3, 4, 5, 9])))
            part = np.ascontiguousarray(np.take(q, range(at, end), axis))
            rows = [np.ascontiguousarray(m[:, :, at:end]) for m in mask]
            got = computed(target, case, [part, k, v, *rows], offset + at)
            assert got.tobytes() == np.take(whole, range(at, end), axis).tobytes(), f"queries {at} to {end}"
            at = end
