"""Cases generated from the declarations: every sample of every op, made concrete."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ir.bind import match_shape
from rlx.ir.dim import symbols
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Arg, Op, Role, Sample, all_ops
from rlx.ir.types import TensorType, TupleType, parse_type

SIZES = {"n": 3, "m": 5, "k": 2}
WIDER = {"f32": "f64", "c64": "c128"}


@dataclass
class Case:
    """One sample: the op, operand types (maybe symbolic), concrete arrays, attributes."""

    op: Op
    number: int
    sample: Sample
    types: list[TensorType]
    arrays: list[np.ndarray]

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.number}"

    @property
    def symbolic(self) -> bool:
        return any(not t.is_static for t in self.types)

    def graph(self, float64: bool = False) -> tuple[Graph, list[Node]]:
        """A graph with inputs x0.. and outputs out0.. of this op."""
        g = Graph(self.op.name)
        inputs = []
        for i, t in enumerate(self.types):
            inputs.append(g.input(f"x{i}", t.shape, WIDER.get(t.dtype.name, t.dtype) if float64 else t.dtype))
        with g.building():
            node = g.add(self.op, inputs, self.sample.attrs, self.sample.bodies)
            g.set_outputs(g.results(node))
        return g, inputs

    def feed(self, float64: bool = False) -> dict[str, np.ndarray]:
        return {
            f"x{i}": a.astype(dtype(WIDER.get(t.dtype.name, t.dtype)).np) if float64 else a
            for i, (t, a) in enumerate(zip(self.types, self.arrays, strict=True))
        }

    def binding(self) -> dict[str, int]:
        binding: dict[str, int] = {}
        for i, (t, a) in enumerate(zip(self.types, self.arrays, strict=True)):
            match_shape(t.shape, a.shape, binding, f"x{i}")
        return binding


def make_array(arg: Any, rng: np.random.Generator) -> tuple[TensorType, np.ndarray]:
    """The type and value of one sample argument."""
    if isinstance(arg, np.ndarray):
        return TensorType(dtype(arg.dtype), arg.shape), arg
    if isinstance(arg, str):
        arg = Arg(arg)
    t = parse_type(arg.type)
    for d in t.shape:
        assert isinstance(d, int) or all(s in SIZES for s in symbols(d)), (
            f"samples use the symbols {sorted(SIZES)}"
        )
    shape = t.bind(SIZES)
    count = int(np.prod(shape, dtype=np.int64))
    if t.dtype.is_bool:
        return t, rng.integers(0, 2, shape).astype(bool)
    if t.dtype.is_int:
        low = max(arg.low, float(t.dtype.min_value))
        return t, rng.integers(int(low), int(arg.high) + 1, shape).astype(t.dtype.np)
    if t.dtype.is_complex:
        return t, (rng.uniform(arg.low, arg.high, shape) + 1j * rng.uniform(arg.low, arg.high, shape)).astype(
            t.dtype.np
        )
    if arg.distinct:
        steps = (rng.permutation(count) + 0.5) / max(count, 1)
        values = (arg.low + (arg.high - arg.low) * steps).reshape(shape)
    else:
        values = rng.uniform(arg.low, arg.high, shape)
    values = values.astype(np.float32)
    if arg.special and count:
        flat = values.reshape(-1)
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
        at = rng.choice(count, min(count, 5), replace=False)
        flat[at] = special[: len(at)]
    return t, values.astype(t.dtype.np)


def cases(op: Op) -> list[Case]:
    out = []
    for number, sample in enumerate(op.samples()):
        rng = np.random.default_rng(zlib.crc32(f"{op.name}/{number}".encode()))
        made = [make_array(a, rng) for a in sample.args]
        out.append(Case(op, number, sample, [t for t, _ in made], [a for _, a in made]))
    return out


ALL_OPS = [op for op in all_ops() if op.role is Role.COMPUTE]
ALL_CASES = [c for op in ALL_OPS for c in cases(op)]
IDS = [c.id for c in ALL_CASES]


def by_op(found: Iterable[Case]) -> Callable[[Callable[[Case], None]], Callable[..., None]]:
    """Decorator: a test of a case becomes a test per op, of all these cases of the op; a failure names its
    case. For tests that take less time than pytest does. The id is the op and how many cases it has."""
    groups: dict[str, list[Case]] = {}
    for case in found:
        groups.setdefault(case.op.name, []).append(case)

    def decorated(test: Callable[[Case], None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_op(own: list[Case]) -> None:
            for case in own:
                try:
                    test(case)
                except BaseException as error:
                    error.add_note(f"case {case.id}")
                    raise

        del of_op.__wrapped__  # type: ignore[attr-defined]  # pytest would ask it for its parameters
        ids = [f"{name}-{len(own)}" for name, own in groups.items()]
        made: Callable[..., None] = pytest.mark.parametrize("own", groups.values(), ids=ids)(of_op)
        return made

    return decorated


def features(case: Case) -> set[tuple[object, ...]]:
    """What makes a case differ in kind from others of its op, rather than in numbers."""
    found: set[tuple[object, ...]] = {("operands", len(case.types)), ("symbolic", case.symbolic)}
    found |= {("dtype", t.dtype.name) for t in case.types}
    found |= {("scalar", not t.shape) for t in case.types}
    found |= {("empty", 0 in a.shape) for a in case.arrays}
    for name, value in case.sample.attrs.items():
        found.add((name, value if isinstance(value, bool | str | None) else "a value"))
    return found


def _sample(op: Op) -> set[str]:
    """Ids of a few cases of an op that together have every feature that its cases have."""
    own, chosen = [c for c in ALL_CASES if c.op is op], set[str]()
    left = set[tuple[object, ...]]().union(*map(features, own))
    while left:
        best = max(own, key=lambda case: len(features(case) & left))  # the first of the best
        chosen.add(best.id)
        left -= features(best)
    return chosen


SAMPLE = set[str]().union(*map(_sample, ALL_OPS))
"""Cases that run by default where every case takes long; the others are slow."""


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Native values against the reference's: integers exactly, floating point as its dtype allows."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    narrow = want.dtype.itemsize <= 2
    scale = 1e-2 if narrow else 2e-5 if want.dtype.itemsize <= 4 or want.dtype == np.complex64 else 1e-12
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=scale, atol=scale, equal_nan=True)


def is_tuple(node: Node) -> bool:
    return isinstance(node.type, TupleType)


__all__ = [
    "ALL_CASES",
    "ALL_OPS",
    "IDS",
    "SAMPLE",
    "SIZES",
    "Case",
    "assert_close",
    "by_op",
    "cases",
    "features",
    "is_tuple",
    "rlx",
]
