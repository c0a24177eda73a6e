"""A GPT-2 decoder with its keys and values in states: prompts, tokens one by one, several streams, guards."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import GuardError, ShapeError
from rlx.reference.interpreter import Interpreter
from rlx.runtime.program import CompiledProgram
from rlx.runtime.stream import Stream
from rlx.zoo.gpt2 import Config, build, random_weights, shapes
from stored_programs import from_file

SMALL = Config(layers=2, width=64, heads=2, vocabulary=90, positions=48)


def weights() -> dict[str, np.ndarray]:
    """Larger than at the start of training, so that tokens matter."""
    return {name: w * 8 if w.ndim == 2 else w for name, w in random_weights(SMALL).items()}


@pytest.fixture(scope="module", params=["fresh", "stored"])
def program(request: pytest.FixtureRequest) -> CompiledProgram:
    made = rlx.compile(build(SMALL, weights()))
    return made if request.param == "fresh" else from_file(made)


def test_the_program_is_native_and_copies_no_cache(program: CompiledProgram) -> None:
    assert program.stats["host_thunks"] == []
    lir = program.lir
    assert set(lir.plan.in_states()) == {s.output.id for s in lir.mir.states}
    assert len(lir.mir.states) == 2 * SMALL.layers
    assert not any(s.output.op.family == "copy" for s in lir.mir.states)


@pytest.mark.parametrize("pieces", [(9,), (1,) * 9, (4, 1, 1, 3), (2, 7)])
def test_any_pieces_of_a_text_end_alike(program: CompiledProgram, pieces: tuple[int, ...]) -> None:
    tokens = np.random.default_rng(0).integers(0, SMALL.vocabulary, sum(pieces))
    run = Interpreter(build(SMALL, weights()))
    want = run.run({"tokens": tokens, "past": 0})
    stream, past = program.stream(), 0
    for n in pieces:
        got = stream.step({"tokens": tokens[past : past + n], "past": past})
        past += n
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=1e-4, atol=1e-4)
    assert got["next"] == want["next"]
    for name, state in run.new_states().items():
        np.testing.assert_allclose(stream.state(name).read()[:, :past], state[:, :past], rtol=1e-4, atol=1e-4)


def greedy(stream: Stream, prompt: list[int], count: int) -> list[int]:
    """A prompt, then the likeliest tokens, one by one."""
    stream.step({"tokens": np.array(prompt[:-1]), "past": 0}, epilogue=False)
    out, past, token = [], len(prompt) - 1, prompt[-1]
    for _ in range(count):
        token = int(stream.step({"tokens": np.array([token]), "past": past})["next"])
        out.append(token)
        past += 1
    return out


def test_interleaved_streams_write_the_same_texts(program: CompiledProgram) -> None:
    prompts = ([3, 1, 4, 1, 5], [2, 7, 1])
    want = [greedy(program.stream(), p, 20) for p in prompts]
    assert want[0] != want[1]
    streams = [program.stream() for _ in prompts]
    tokens = [p[-1] for p in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        stream.step({"tokens": np.array(prompt[:-1]), "past": 0}, epilogue=False)
    got: list[list[int]] = [[], []]
    for i in range(20):
        for which, stream in enumerate(streams):
            past = len(prompts[which]) - 1 + i
            tokens[which] = int(stream.step({"tokens": np.array([tokens[which]]), "past": past})["next"])
            got[which].append(tokens[which])
    assert got == want


def test_a_text_that_does_not_fit_is_refused_and_the_stream_goes_on(
    program: CompiledProgram,
) -> None:
    stream = program.stream()
    stream.step({"tokens": np.arange(40), "past": 0})
    with pytest.raises(GuardError, match="new=9, past=40"):
        stream.step({"tokens": np.arange(9), "past": 40})
    with pytest.raises(GuardError, match="size 'past' is 48; it must be 0 to 47"):
        stream.step({"tokens": np.arange(1), "past": 48})
    stream.step({"tokens": np.arange(8), "past": 40})


def test_the_prompt_needs_no_choice(program: CompiledProgram) -> None:
    out = program.stream().step({"tokens": np.array([1, 2]), "past": 0}, epilogue=False)
    assert "next" not in out


def test_append_says_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="2 rows at 4 do not fit axis 0 of size 5"):
        ops.append(np.zeros(5), np.ones(2), 4)
    g = rlx.Graph("cache")
    at = g.size("at", maximum=7)
    full, filled = ops.append(g.state("s", (8, 2), "f32"), g.input("x", (1, 2), "f32"), at)
    assert g.constraints == [] and str(filled.type) == "f32[at+1,2]" and str(full.type) == "f32[8,2]"


@pytest.mark.slow
def test_a_step_grows_by_attention_only() -> None:
    """CPU time of one thread at 64 and 1,023 cached tokens, less what attention's kernels take themselves."""
    path = Path(__file__).parents[3] / "bench" / "decode.py"
    bench = SimpleNamespace(**runpy.run_path(str(path)))
    config = Config(layers=4, width=512, heads=8, vocabulary=4000, positions=1024)
    program = rlx.compile(build(config, random_weights(config)), threads=1)
    stream = program.stream()
    stream.step({"tokens": np.arange(1023), "past": 0}, epilogue=False)
    for _ in range(4):  # other processes share the caches: the best of a few measurements
        times = bench.step_times(stream, (64, 1023), 60)
        own = {n: bench.own_time(program, stream, n, 30) for n in times}
        growth = (times[1023] - own[1023]) / (times[64] - own[64]) - 1
        if abs(growth) <= 0.1:
            break
    assert own[1023] > 4 * own[64]
    assert abs(growth) <= 0.1


def test_bits_do_not_depend_on_threads() -> None:
    graph, results = build(SMALL, weights()), []
    for threads in (1, 2, 3):
        stream = rlx.compile(graph, threads=threads).stream()
        stream.step({"tokens": np.arange(9), "past": 0})
        results.append(
            [stream.step({"tokens": np.array([n]), "past": 9 + n})["logits"].tobytes() for n in range(5)]
        )
    assert results[0] == results[1] == results[2]


def test_a_decoder_whose_weights_are_streamed() -> None:
    config = Config(layers=3, width=128, heads=2, vocabulary=300, positions=32)
    graph = build(config, random_weights(config))
    streams = [rlx.compile(graph, **options).stream() for options in ({}, {"weight_budget": "1200KiB"})]
    assert streams[1].program.memory({"new": 1, "past": 0})["ring"] > 0
    first = [s.step({"tokens": np.arange(4), "past": 0}, epilogue=False) for s in streams]
    assert first[0].keys() == first[1].keys()
    for past in range(4, 10):
        one, other = (s.step({"tokens": np.array([past]), "past": past}) for s in streams)
        np.testing.assert_array_equal(one["logits"], other["logits"])


def test_shapes_are_those_of_gpt2() -> None:
    assert sum(int(np.prod(s)) for s in shapes(Config()).values()) == 124_439_808
