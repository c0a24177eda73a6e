"""Every op, model and runtime module on every named target: plan, code and results are what they were.

A commit that only moves code leaves all digests equal. Any other says in its body which it changes, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_OPS, Case, cases

import rlx
from emission import emit, first_cases, runtime_modules
from replay.canonical import canonical, canonical_module
from replay.records import Digests, Key, Records, digest, digest_of_arrays
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph
from rlx.plan.text import canonical_text
from rlx.target.cpu import Target, runs_here, targets
from rlx.zoo.samples import FEEDS, feeds

FOLDER = Path(__file__).parent
FIRST = first_cases()
DEFAULT_MODELS = ("silero-op15", "ppocr-cls")
"""Two small ones: a recurrent network on sound, a convolutional one on images."""

Keep = Callable[[str, str], None]
Check = Callable[[str, str, Mapping[Key, Digests]], None]


def digests(label: str, graph: Graph, feed: Mapping[str, np.ndarray], target: Target, keep: Keep) -> Digests:
    """Of one graph on one target; it runs if this machine can."""
    made = emit(label, graph, target)
    # Without the version of the compiler: a release changes no plan.
    plan = "".join(
        line
        for line in canonical_text(made.lir).splitlines(keepends=True)
        if not line.startswith("compiler ")
    )
    code = canonical(made.kernels)
    keep(f"{label}/{target.name}.plan", plan)
    keep(f"{label}/{target.name}.ll", code)
    bits = None
    if runs_here(target):
        # Not from the cache: what is compared is what this compiler makes.
        program = rlx.compile(graph, target=target.name, threads=2, cache=False)
        bits = digest_of_arrays(program.run(feed))
    return Digests(digest(plan), digest(code), bits)


def of_cases(name: str, group: Iterable[Case], keep: Keep) -> dict[Key, Digests]:
    graphs = [(case, case.graph()[0]) for case in group]
    return {
        Key(name, target.name): Digests.joined(
            digests(case.id, graph, case.feed(), target, keep) for case, graph in graphs
        )
        for target in targets()
    }


def of_model(id: str, path: Path, keep: Keep) -> dict[Key, Digests]:
    graph = rlx.from_onnx(path)
    names = {node.attrs["name"] for node in graph.inputs}
    feed = {name: value for name, value in feeds(id)[0].items() if name in names}
    return {Key(id, target.name): digests(id, graph, feed, target, keep) for target in targets()}


@pytest.mark.parametrize("name", FIRST)
def test_op(name: str, replay: Check, keep_text: Keep) -> None:
    replay("ops", "tests/replay", of_cases(name, [FIRST[name]], keep_text))


@pytest.mark.slow
@pytest.mark.parametrize("name", [op.name for op in ALL_OPS])
def test_every_sample(name: str, replay: Check, keep_text: Keep) -> None:
    op = next(op for op in ALL_OPS if op.name == name)
    replay("samples", "-m slow tests/replay", of_cases(name, cases(op), keep_text))


def check_model(id: str, run: str, zoo_path: Callable[..., Path], replay: Check, keep: Keep) -> None:
    pytest.importorskip("onnx")
    zoo_path("page"), zoo_path("beckett")  # their input
    replay("models", run, of_model(id, zoo_path(id), keep))


@pytest.mark.parametrize("id", DEFAULT_MODELS)
def test_model(id: str, zoo_path: Callable[..., Path], replay: Check, keep_text: Keep) -> None:
    check_model(id, "tests/replay", zoo_path, replay, keep_text)


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id in FEEDS if id not in DEFAULT_MODELS])
def test_every_model(id: str, zoo_path: Callable[..., Path], replay: Check, keep_text: Keep) -> None:
    check_model(id, "-m slow tests/replay", zoo_path, replay, keep_text)


def quantised(bits: int, scale: str, zeros: bool) -> tuple[Graph, dict[str, np.ndarray]]:
    """A matmul with weights of few bits, which a program keeps so."""
    rng, (k, n, group) = np.random.default_rng(0), (72, 50, 32)
    g = Graph("quantised")
    codes = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (k, n)).astype(np.int8)
    factors = rng.uniform(0.1, 1, (1 + zeros, -(-k // group), n)).astype(scale)
    held = [g.param(f"p{i}", f.shape, dtype(f.dtype), value=f) for i, f in enumerate(factors)]
    w = rlx.ops.dequantize_groups(g.param("q", (k, n), "i8", value=codes), *held, bits=bits, group=group)
    g.output("y", rlx.ops.relu(g.input("x", ("m", k), "f32") @ w + 1.0))
    return g, {"x": rng.standard_normal((5, k)).astype(np.float32)}


def shared_factors(bits: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """A matmul with minimums, whose factors are codes with factors of 8 groups."""
    rng, (k, n, group) = np.random.default_rng(0), (300, 50, 32)
    g = Graph("shared")

    def held(name: str, value: np.ndarray) -> rlx.Node:
        return g.param(name, value.shape, dtype(value.dtype), value=value)

    def factor(name: str) -> rlx.Node:
        codes = held(f"{name}.codes", rng.integers(0, 64, (10, n)).astype(np.int8))
        of_blocks = held(name, rng.uniform(0.01, 0.02, (2, n)).astype(np.float16))
        return rlx.ops.dequantize_groups(codes, of_blocks, bits=8, group=8)

    codes = held("codes", rng.integers(0, 1 << bits, (k, n)).astype(np.uint8))
    how = {"bits": bits, "group": group, "minimums": True}
    w = rlx.ops.dequantize_groups(codes, factor("scales"), factor("minimums"), **how)
    g.output("y", rlx.ops.relu(g.input("x", ("m", k), "f32") @ w + 1.0))
    return g, {"x": rng.standard_normal((5, k)).astype(np.float32)}


def half(kind: str) -> tuple[Graph, dict[str, np.ndarray]]:
    """A table of 16 bits that is read by rows and multiplied by, and another matrix."""
    rng = np.random.default_rng(0)
    g = Graph("half")
    table, up = (
        rlx.ops.cast(
            g.param(name, shape, kind, value=rng.standard_normal(shape).astype(dtype(kind).np)), "f32"
        )
        for name, shape in (("table", (70, 36)), ("up", (36, 50)))
    )
    x = rlx.ops.embedding(table, g.input("tokens", ("m",), "i64"))
    g.output("up", rlx.ops.relu(x @ up + 1.0))
    g.output("y", x @ rlx.ops.transpose(table))
    return g, {"tokens": rng.integers(0, 70, 100)}


PROGRAMS: dict[str, Callable[[], tuple[Graph, dict[str, np.ndarray]]]] = {
    "quantised-4": lambda: quantised(4, "float32", False),
    "quantised-4-zeros": lambda: quantised(4, "float16", True),
    "quantised-8": lambda: quantised(8, "float16", False),
    "quantised-6": lambda: quantised(6, "float16", False),
    "quantised-8-zeros": lambda: quantised(8, "float32", True),
    "quantised-4-shared": lambda: shared_factors(4),
    "quantised-6-shared": lambda: shared_factors(6),
    "quantised-8-shared": lambda: shared_factors(8),
    "half-bf16": lambda: half("bf16"),
    "half-f16": lambda: half("f16"),
}
"""What passes make of several ops, where no sample of one op and no model of the default run shows it."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, replay: Check, keep_text: Keep) -> None:
    graph, feed = PROGRAMS[name]()
    found = {Key(name, target.name): digests(name, graph, feed, target, keep_text) for target in targets()}
    replay("programs", "tests/replay", found)


def runtime_digests(target: Target, keep: Keep) -> dict[Key, Digests]:
    """The native code that is no kernel of a program, a line for each module; all reductions are one."""
    found: dict[Key, list[str]] = {}
    for label, text, _ in runtime_modules(target, all_reductions=True):
        code = canonical_module(text)
        keep(f"runtime/{label.replace(' ', '-')}/{target.name}.ll", code)
        found.setdefault(Key(label.split()[0], target.name), []).append(digest(code))
    return {key: Digests("-", digest(*codes), None) for key, codes in found.items()}


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_runtime(target: Target, replay: Check, keep_text: Keep) -> None:
    replay("runtime", "tests/replay", runtime_digests(target, keep_text))


RUNTIME = {label.split()[0] for label, _, _ in runtime_modules(targets()[0], all_reductions=False)}


@pytest.mark.parametrize(
    ("file", "known"),
    [
        ("ops", set(FIRST)),
        ("samples", {op.name for op in ALL_OPS}),
        ("models", set(FEEDS)),
        ("programs", set(PROGRAMS)),
        ("runtime", RUNTIME),
    ],
)
def test_no_line_is_left_over(file: str, known: set[str], request: pytest.FixtureRequest) -> None:
    """Of ops, models and targets that are gone."""
    records = Records(FOLDER / f"{file}.txt", "pytest tests/replay --update-replay")
    machines = {target.name for target in targets()}
    left = {key for key in records.read() if key.name not in known or key.target not in machines}
    if request.config.getoption("--update-replay"):
        records.write({}, drop=left)
        return
    assert not left, f"{records.path.name} has lines of {sorted(left)}; remove them: {records.accept}"
