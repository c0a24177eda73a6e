"""Programs exported to C, called through their C interface: the bits of the compiled program."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, by_op, cases, features
from random_programs import random_program

import rlx
from exported_programs import ExportError, Library, Model
from rlx import ops
from rlx.errors import UnsupportedError
from rlx.export.errors import Code
from rlx.ir.graph import Graph

Feed = Mapping[str, np.ndarray]

# One of each kind of kernel, and of each kind of control flow.
SAMPLE = (
    "add attention cond conv cumsum erf gather layer_norm loop matmul max_pool matmul_integer rope scan "
    "scatter softmax sort where"
).split()


def hardest(samples: list[Case]) -> Case:
    return max(samples, key=lambda case: (case.symbolic, len(features(case))))


def check_case(case: Case, folder: Path) -> bool:
    """Whether a case can be exported; then it has the bits of the program."""
    program = rlx.compile(case.graph()[0], threads=1)
    sizes, feed = case.binding(), case.feed()
    try:
        library = Library(program, folder, {name: (0, size + 3) for name, size in sizes.items()})
    except UnsupportedError:
        assert program.stats["host_thunks"] or "nonzero" in case.id
        return False
    model = library.open()
    if sizes:
        model.bind([sizes[s.name] for s in library.tables.symbols])
    same_bits(model.run(feed), program.run(feed))
    model.close()
    return True


def same_bits(got: Feed, want: Feed) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.name in SAMPLE], ids=lambda op: op.name)
def test_a_sample_of_ops(op, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert any(check_case(case, tmp_path) for case in (hardest(cases(op)), cases(op)[0]))


@pytest.mark.slow
def test_most_ops_can_be_exported(tmp_path: Path) -> None:
    """Those without a host thunk, and all of them with the bits of the program."""
    exported = [op.name for op in ALL_OPS if check_case(hardest(cases(op)), tmp_path)]
    assert len(exported) > 200


@pytest.mark.slow
@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        check_case(case, Path(folder))


# -- control flow


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def opened(
    g: Graph, folder: Path, threads: int = 1, **bind: tuple[int, int]
) -> tuple[rlx.CompiledProgram, Library, Model]:
    program = rlx.compile(g, threads=1)
    library = Library(program, folder, bind)
    return program, library, library.open(threads=threads)


on_threads = pytest.mark.parametrize("threads", [1, 3])


@on_threads
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_of_any_length(tmp_path: Path, reverse: bool, threads: int) -> None:
    """Lengths that are known when sizes are bound: none, odd and even, nested in a loop over rows."""
    g = Graph("scans")

    def outer(h, x):  # type: ignore[no-untyped-def]
        inner, rows = ops.scan(
            lambda a, b: (ops.tanh(a * 0.5 + b), a * 2.0), h, ops.stack([x, x * 0.25, h]), reverse=reverse
        )
        return inner, ops.sum(rows, axis=0)

    last, every = ops.scan(outer, g.input("h", ("m",), "f32"), g.input("x", ("n", "m"), "f32"))
    g.output("last", last)
    g.output("every", every)
    program, _, model = opened(g, tmp_path, threads, n=(0, 40), m=(1, 17))
    for n, m in ((3, 4), (0, 4), (40, 17), (2, 1)):
        model.bind([m, n])
        feed = {"h": values(m), "x": values(n, m, seed=1)}
        same_bits(model.run(feed), program.run(feed))
    model.close()


@on_threads
def test_loops_that_data_end(tmp_path: Path, threads: int) -> None:
    g = Graph("while")
    x = g.input("x", (5,), "f32")
    grown = ops.while_loop(lambda v: ops.sum(v) < 100.0, lambda v: v * 1.5 + 1.0, x)
    g.output("y", ops.cond(ops.sum(x) < 0.0, lambda: grown * 2.0, lambda: ops.sort(grown)))
    program, _, model = opened(g, tmp_path, threads)
    for first in (-0.75, 0.0, 3.0, 500.0):
        feed = {"x": values(5) + np.float32(first)}
        same_bits(model.run(feed), program.run(feed))
    model.close()


@on_threads
def test_a_branch_for_other_sizes_fails_with_a_text(tmp_path: Path, threads: int) -> None:
    """Each branch assumes a size; a run that takes the other one must not touch its memory."""
    g = Graph("either")
    x, even = g.input("x", ("n",), "f32"), g.input("even", (), "bool")
    four, six = (lambda: ops.sum(ops.reshape(x, (2, 2)))), (lambda: ops.max(ops.reshape(x, (2, 3))))
    g.output("y", ops.cond(even, four, six))
    program, _, model = opened(g, tmp_path, threads, n=(0, 8))
    for count, first in ((4, True), (6, False)):
        model.bind([count])
        feed = {"x": values(count), "even": np.array(first)}
        same_bits(model.run(feed), program.run(feed))
        with pytest.raises(ExportError, match="chose a branch that assumes other sizes") as failed:
            model.run({**feed, "even": np.array(not first)})
        assert failed.value.code == Code.BRANCH
    with pytest.raises(ExportError, match="no branch of"):
        model.bind([5])
    model.close()


# -- states and streams


@on_threads
def test_states_last_from_run_to_run(tmp_path: Path, threads: int) -> None:
    """A state with a first value, a context that is prepared once, an output of the prologue."""
    g = Graph("stream")
    w = g.param("w", (4, 4), "f32", value=values(4, 4))
    context = ops.tanh(g.input("context", (2, 4), "f32", once=True) @ w)
    h = g.state("h", (2, 4), "f32", init=values(2, 4, seed=3))
    new = ops.tanh((h + context + g.input("x", (2, 4), "f32")) @ w)
    g.set_state("h", new)
    g.output("context_out", context * 1.0)
    g.output("best", ops.argmax(new * 3.0, axis=1))
    g.output("sum", ops.sum(new, axis=1))
    program, _, model = opened(g, tmp_path, threads)
    once = values(2, 4, seed=4)
    for _ in range(2):
        stream = program.stream({"context": once})
        for step in range(3):
            x = values(2, 4, seed=step)
            same_bits(model.run({"context": once, "x": x}), stream.step({"x": x}))
        model.reset()
    model.close()


@on_threads
def test_a_cache_grows_by_a_size(tmp_path: Path, threads: int) -> None:
    g = Graph("cache")
    past = g.size("past", maximum=7)
    x, cache = g.input("x", (2, 1, 8), "f32"), g.state("cache", (2, 8, 8), "f32")
    with g.building():
        at = ops.dim_value(past)
    new = ops.dynamic_update_slice(cache, x, [at], axes=(1,))
    g.set_state("cache", new)
    g.output("y", ops.sum(new[:, : past + 1] * x, axis=1))
    program, library, model = opened(g, tmp_path, threads)
    assert library.tables.ranges == {"past": (0, 7)}  # what the graph declares
    stream = program.stream()
    for n in range(8):
        feed = {"past": np.empty((n, 0), np.int8), "x": values(2, 1, 8, seed=n)}
        model.bind([n])
        same_bits(model.run(feed), stream.step(feed))
    model.close()


@on_threads
def test_a_failed_run_of_a_stream_asks_for_a_reset(tmp_path: Path, threads: int) -> None:
    g = Graph("index")
    total = g.state("total", (3,), "f32") + g.input("x", (3,), "f32")
    g.set_state("total", total)
    g.output("y", ops.gather(total, g.input("i", (2,), "i64"), axis=0))
    _, _, model = opened(g, tmp_path, threads)
    good = {"x": np.ones(3, np.float32), "i": np.array([0, 2])}
    assert model.run(good)["y"].tolist() == [1, 1]
    with pytest.raises(ExportError, match="an index from data is out of range") as failed:
        model.run({**good, "i": np.array([0, 3])})
    assert failed.value.code == Code.INDEX
    with pytest.raises(ExportError, match="call reset first"):
        model.run(good)
    model.reset()
    assert model.run(good)["y"].tolist() == [1, 1]
    model.close()


# -- sizes and weights


def layers() -> Graph:
    g = Graph("layers")
    x, w = g.input("x", ("n", "k"), "f32"), g.param("w", (24, 16), "f32", value=values(24, 16))
    rows = ops.reshape(x, (-1, 24)) @ w
    g.output("y", ops.softmax(rows + g.param("b", (16,), "f32", value=values(16, seed=2))))
    return g


def test_sizes_are_checked_by_bind(tmp_path: Path) -> None:
    program, library, model = opened(layers(), tmp_path, n=(1, 6), k=(2, 12))
    assert [s.name for s in library.tables.symbols] == ["k", "n"]
    with pytest.raises(ExportError, match="call bind first"):
        model.run({"x": np.empty((0, 0), np.float32)})
    for sizes, told in (
        ([12, 7], "size 'n' must be from 1 to 6"),
        ([1, 6], "size 'k' must be from 2 to 12"),
        ([5, 5], r"assumes 24\*\(\(k\*n\)//24\) equals k\*n"),
    ):
        model.bind([12, 2])
        with pytest.raises(ExportError, match=told):
            model.bind(sizes)
        feed = {"x": values(2, 12)}
        same_bits(model.run(feed), program.run(feed))  # as if bind had not been called
    for k, n in ((12, 6), (8, 3), (4, 6), (12, 2)):
        model.bind([k, n])
        feed = {"x": values(n, k)}
        same_bits(model.run(feed), program.run(feed))
    model.close()


def test_threads_give_the_same_bits(tmp_path: Path) -> None:
    """Many runs in a row: threads meet after every kernel, and wait for the next run."""
    g = Graph("deep")
    x = g.input("x", ("n", 64), "f32")
    for i in range(6):
        x = ops.layer_norm(
            ops.gelu(x @ g.param(f"w{i}", (64, 64), "f32", value=0.2 * values(64, 64, seed=i)))
        )
        x = x[:, ::-1] if i % 2 else x
    g.output("y", ops.cumsum(x, 1))
    program, library, one = opened(g, tmp_path, n=(1, 40))
    models = [one, *(library.open(threads=n) for n in (2, 3, 8))]
    for turn in range(60):
        n = 40 - turn % 5
        feed = {"x": values(n, 64, seed=turn)}
        want = program.run(feed)
        for model in models[: 2 + turn % 3]:
            model.bind([n])
            same_bits(model.run(feed), want)
    for model in models:
        model.close()


def test_contexts_are_independent(tmp_path: Path) -> None:
    program, library, one = opened(layers(), tmp_path, n=(1, 6), k=(2, 12))
    other = library.open()
    one.bind([12, 2])
    other.bind([4, 6])
    first, second = {"x": values(2, 12)}, {"x": values(6, 4, seed=1)}
    wanted = one.run(first)
    same_bits(other.run(second), program.run(second))
    same_bits({"y": one.array("output", 0, 2, np.dtype(np.float32))}, wanted)
    one.close()
    same_bits(other.run(second), program.run(second))
    other.close()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: b"", Code.TRUNCATED),
        (lambda data: data[:5000], Code.TRUNCATED),
        (lambda data: data[:-1], Code.TRUNCATED),
        (lambda data: b"x" + data[1:], Code.DAMAGED),
        (lambda data: data[:8] + bytes(8) + data[16:], Code.VERSION),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], Code.DAMAGED),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], Code.DAMAGED),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    layers_library: Library, tmp_path: Path, change: Callable[[bytes], bytes], code: Code
) -> None:
    path = tmp_path / "other.weights"
    path.write_bytes(change(layers_library.weights.read_bytes()))
    with pytest.raises(ExportError) as failed:
        layers_library.open(path)
    assert failed.value.code == code


@pytest.fixture(scope="module")
def layers_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(rlx.compile(layers(), threads=1), tmp_path_factory.mktemp("layers"))


def test_missing_weights_are_refused(layers_library: Library, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):  # a folder can be opened, but not mapped
        with pytest.raises(ExportError) as failed:
            layers_library.open(path)
        assert failed.value.code == Code.OPEN
    with pytest.raises(ExportError, match="fewer than 1 thread"):
        layers_library.open(threads=0)


def test_arguments_that_make_no_sense_crash_nothing(layers_library: Library) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    model, call = layers_library.open(), layers_library.function
    assert call("bind", number, pointer, pointer)(None, None) == Code.ARGUMENT
    assert call("bind", number, pointer, pointer)(model._place, None) == Code.ARGUMENT
    assert call("run", number, pointer)(None) == Code.ARGUMENT
    assert call("init", number, pointer, pointer, ctypes.c_int64)(None, None, 0) == Code.ARGUMENT
    assert call("open", number, pointer, ctypes.c_char_p, number)(None, None, 1) == Code.ARGUMENT
    for name in ("input", "output", "input_shape", "output_shape"):
        find = call(name, pointer, pointer, number)
        assert find(model._place, 0) and not find(None, 0)
        assert not any(find(model._place, i) for i in (1, -1, 1 << 30, -(1 << 31)))
    for name in ("reset", "close"):
        call(name, None, pointer)(None)
    text = call("error", ctypes.c_char_p, number)
    assert {text(code) for code in (1000, -1, 1 << 30)} == {b"this code is not known"}
    model.close()


@pytest.mark.parametrize("mutants", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_no_mutant_of_the_weights_is_taken(layers_library: Library, tmp_path: Path, mutants: int) -> None:
    """Any byte that changes, wherever it is, is found before a kernel reads it."""
    data, path = layers_library.weights.read_bytes(), tmp_path / "mutant.weights"
    rng = np.random.default_rng(zlib.crc32(b"mutants"))
    read = np.concatenate(
        [np.arange(32), 4096 + np.arange(len(data) - 4096)]
    )  # the rest of the head is unused
    for at in rng.choice(read, mutants):
        mutant = bytearray(data)
        mutant[at] ^= 1 << rng.integers(8)
        path.write_bytes(mutant)
        with pytest.raises(ExportError):
            layers_library.open(path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_at_several_sizes(tmp_path: Path, seed: int) -> None:
    """One export serves all sizes: placed for the largest, with the bits of programs placed for each."""
    g, feed = random_program(seed, symbolic=True)
    program, _, model = opened(g, tmp_path, threads=1 + seed % 2, n=(0, 9))
    rng = np.random.default_rng(seed)
    for n in (9, 1, 6, 0, 3):
        sized = {
            name: rng.permutation(np.resize(array, (n, *array.shape[1:]))) for name, array in feed.items()
        }
        model.bind([n])
        same_bits(model.run(sized), program.run(sized))
    model.close()
