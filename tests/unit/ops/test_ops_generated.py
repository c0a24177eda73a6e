"""Tests generated from the op declarations: an op added to rlx.ops is tested by nobody writing a test."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, by_op

from rlx.ir.graph import Graph
from rlx.ir.op import Level, run_rule
from rlx.ir.types import tensor_types
from rlx.kernel.form import HostCall, Loop, Template
from rlx.reference.forms import run_form
from rlx.reference.interpreter import evaluate
from rlx.transform.expand import expand_graph
from rlx.transform.grad import is_differentiable_dtype, jvp_graph, vjp_graph
from rlx.transform.vmap import batch_graph

BATCH = 3


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{got.dtype}{got.shape} != {want.dtype}{want.shape}"
    )
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
    else:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        eps = max(tolerance, 8 * float(np.finfo(np.float16).eps)) if want.dtype.itemsize <= 2 else tolerance
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=eps, atol=eps, equal_nan=True)


def test_every_op_has_samples_and_counts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    without = [op.name for op in ALL_OPS if not op.samples()]
    assert not without, f"ops without samples: {without}"
    with capsys.disabled():
        print(f"\n{len(ALL_OPS)} ops, {len(ALL_CASES)} samples")


@by_op(ALL_CASES)
def test_type_rule_and_expansion_or_lowering_are_the_reference(case: Case) -> None:
    g, inputs = case.graph()
    want = list(evaluate(g, case.feed()).values())  # the interpreter compares results with inferred types
    node = next(n for n in g.nodes if n.op is case.op)
    if case.op.level is Level.HIR:
        for a, b in zip(evaluate(expand_graph(g), case.feed()).values(), want, strict=True):
            close(a, b)
        return
    if case.op.host_only:
        return
    form = run_rule(case.op, "lower", *(n.type for n in inputs), node=node)
    if isinstance(form, (HostCall, Loop, Template)):
        return
    binding = case.binding()
    got = run_form(form, case.arrays, binding, want[0].shape)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        close(np.asarray(a), b)
    assert run_rule(case.op, "cost", *(n.type for n in inputs), node=node) is not None
    assert len(tensor_types(node.type)) == len(want)


def finite_difference(
    g: Graph, feed: dict[str, np.ndarray], name: str, direction: np.ndarray
) -> list[np.ndarray]:
    step = 1e-6
    up = evaluate(g, {**feed, name: feed[name] + step * direction})
    down = evaluate(g, {**feed, name: feed[name] - step * direction})
    return [(up[k] - down[k]) / (2 * step) for k in up]


def random_like(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random direction of the same kind; complex ones have both parts."""
    imaginary = 1j * rng.standard_normal(a.shape) if a.dtype.kind == "c" else 0
    return np.asarray(rng.standard_normal(a.shape) + imaginary).astype(a.dtype)


SMOOTH = [
    c
    for c in ALL_CASES
    if c.sample.grad and c.op.not_differentiable is None
    if any(t.dtype.is_float or t.dtype.is_complex for t in c.types)
]


def float_inputs(case: Case, g: Graph) -> list[str]:
    return [n.attrs["name"] for n in g.inputs if is_differentiable_dtype(n)]


@by_op(SMOOTH)
def test_gradient_and_jvp_are_finite_differences(case: Case) -> None:
    g, _ = case.graph(float64=True)
    feed = case.feed(float64=True)
    names = float_inputs(case, g)
    assert names
    rng = np.random.default_rng(1)
    outs = {k: v for k, v in evaluate(g, feed).items() if is_differentiable_dtype(g.outputs[k])}
    cotangents = {f"ct_{k}": random_like(v, rng) for k, v in outs.items()}
    grads = evaluate(vjp_graph(g, names), {**feed, **cotangents})
    tangents = {n: random_like(feed[n], rng) for n in names}
    forward = evaluate(jvp_graph(g, names), {**feed, **{f"t_{n}": t for n, t in tangents.items()}})
    total = {k: np.zeros_like(v) for k, v in outs.items()}
    for name in names:
        for k, d in zip(g.outputs, finite_difference(g, feed, name, tangents[name]), strict=True):
            if k in outs:
                total[k] = total[k] + d
    for name in names:
        slopes = dict(zip(g.outputs, finite_difference(g, feed, name, tangents[name]), strict=True))
        want = sum(float(np.real(np.sum(cotangents[f"ct_{k}"] * slopes[k]))) for k in outs)
        got = float(np.real(np.sum(grads[f"grad_{name}"] * tangents[name])))
        scale = 1 + abs(want) + float(np.abs(grads[f"grad_{name}"]).sum())
        assert abs(got - want) <= 1e-5 * scale, f"gradient of {name}: {got} but finite differences say {want}"
    for k in outs:
        np.testing.assert_allclose(
            forward[f"tan_{k}"], total[k], rtol=1e-4, atol=1e-5 * (1 + np.abs(total[k]).max(initial=0))
        )


# a result whose size is a number of the data has no batched form
BATCHED = [c for c in ALL_CASES if not c.symbolic and c.arrays and "count" not in c.op.attrs]


@by_op(BATCHED)
def test_batching_is_a_loop(case: Case) -> None:
    g, _ = case.graph()
    rng = np.random.default_rng(2)
    names = [f"x{i}" for i in range(len(case.arrays))]
    subsets = [names] if len(names) == 1 else [names, names[:1], names[1:]]
    for chosen in subsets:
        feeds = [
            {n: (_vary(a, b, rng) if n in chosen else a) for n, a in zip(names, case.arrays, strict=True)}
            for b in range(BATCH)
        ]
        want = [list(evaluate(g, f).values()) for f in feeds]
        axes = {
            n: (case.arrays[i].ndim if i % 2 else 0) for i, n in enumerate(names) if n in chosen
        }  # first and last place
        batched = batch_graph(g, {n: axes.get(n) for n in names}, BATCH)
        stacked = {n: np.stack([f[n] for f in feeds], axes[n]) if n in axes else feeds[0][n] for n in names}
        got = evaluate(batched, stacked)
        for i, value in enumerate(got.values()):
            close(value, np.stack([w[i] for w in want]))


def _vary(a: np.ndarray, b: int, rng: np.random.Generator) -> np.ndarray:
    """Another operand of the same kind: the elements in another order keep indices and domains valid."""
    if b == 0 or a.size < 2:
        return a
    return rng.permutation(a.reshape(-1)).reshape(a.shape)
