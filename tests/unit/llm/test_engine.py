"""Engines: many requests at once, each with the bits that it has alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny
from served import held
from tiny_chat import write_chat_model

import rlx
from rlx.errors import BudgetError, ConfigError, InputError, RlxError
from rlx.llm import Engine, Generation, Piece, QueueFull, Request, Sampling
from rlx.llm.batching.pages import PAGE
from rlx.llm.batching.sequence import Answer
from rlx.llm.engine import QUIET_SECONDS
from rlx.system import SYSTEM

MODEL = {**tiny.CONFIGS["llama"], "max_position_embeddings": 512}
BYTES = PAGE * 3 * 2 * 2 * 16 * 4  # of a page: layers, keys and values, heads, features, f32
I8_BYTES = PAGE * 3 * 2 * 2 * (16 + 4)
TEXT = {"type": "string", "minLength": 60}
Logits = dict[int, list[bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("engine"), **MODEL)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits of every token of every generation, as bytes."""
    found: Logits = {}
    choose, alive = Answer.choose, set()

    def kept(self: Answer, logits: np.ndarray) -> str | None:
        alive.add(self.generation)  # or another would get its id
        found.setdefault(id(self.generation), []).append(logits.tobytes())
        return choose(self, logits)

    monkeypatch.setattr(Answer, "choose", kept)
    return found


def random_requests(seed: int, count: int = 16, shared: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(2, 95, n))

    start = tokens(shared)
    return [
        Request(
            start + tokens(int(rng.integers(1, 150))),
            max_tokens=int(rng.integers(1, 40)),
            sampling=Sampling(temperature=float(rng.choice([0.0, 1.0])), seed=i),
        )
        for i in range(count)
    ]


Outcome = tuple[str | None, str, list[bytes]]


def outcomes(engine: Engine, requests: Sequence[Request], logits: Logits, at_once: bool) -> list[Outcome]:
    """How each request ended, its text, and the bits of all its logits."""
    generations: list[Generation] = []
    texts: list[str] = []
    for request in requests:
        generations.append(engine.submit(request))
        if not at_once:
            texts.append(generations[-1].text)
    texts = texts or [g.text for g in generations]
    return [(g.finish_reason, text, logits[id(g)]) for g, text in zip(generations, texts, strict=True)]


def alone(folder: Path, requests: Sequence[Request], logits: Logits) -> list[Outcome]:
    """Each request in an engine that has nothing else."""
    with Engine(folder, slots=1, threads=1) as engine:
        found = outcomes(engine, requests, logits, at_once=False)
        assert engine.stats()["prefix_hits"] == 0, "or it is not the whole computation"
        return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("chunk", "slots"), [(1, 16), (7, 16), (64, 16), (64, 3)])
def test_streams_have_the_bits_that_they_have_alone(
    folder: Path, logits: Logits, chunk: int, slots: int, threads: int
) -> None:
    requests = random_requests(chunk)
    want = alone(folder, requests, logits)
    with Engine(folder, slots=slots, prefill_chunk=chunk, threads=threads) as engine:
        assert outcomes(engine, requests, logits, at_once=True) == want
        found = engine.stats()
    assert found["steps"] < found["computed_tokens"] or chunk == 1, "steps are shared"
    assert found["pages_used"] == found["running"] == found["waiting"] == 0


@pytest.mark.parametrize("name", ["qwen3moe"])
def test_mixtures_of_experts(name: str, tmp_path: Path, logits: Logits) -> None:
    experts = write_chat_model(tmp_path, **{**tiny.CONFIGS[name], "max_position_embeddings": 512})
    requests = random_requests(3, count=8)
    want = alone(experts, requests, logits)
    with Engine(experts, slots=8, prefill_chunk=30, threads=2) as engine:
        assert outcomes(engine, requests, logits, at_once=True) == want


def test_preempted_requests_are_computed_again_with_the_same_bits(folder: Path, logits: Logits) -> None:
    requests = [Request(r.tokens[:60], 100, r.sampling) for r in random_requests(5)]
    want = alone(folder, requests, logits)
    with Engine(folder, kv_memory=6 * BYTES, prefill_chunk=50, threads=1) as engine:
        assert outcomes(engine, requests, logits, at_once=True) == want
        found = engine.stats()
    assert found["preemptions"] > 0 and found["pages"] == 6
    assert found["pages_used"] == 0 and found["finished"] == len(requests)


def test_a_prefix_is_computed_once(folder: Path, logits: Logits) -> None:
    first, *others = random_requests(9, shared=130)
    want = [alone(folder, [request], logits)[0] for request in others]
    with Engine(folder, threads=1) as engine:
        engine.submit(first).wait()
        before = engine.stats()
        generations = [engine.submit(request) for request in others]
        texts = [g.text for g in generations]
        stats = engine.stats()
    for generation, text, outcome in zip(generations, texts, want, strict=True):
        assert (generation.finish_reason, text, logits[id(generation)]) == outcome
        assert generation.cached_tokens == 128
    assert stats["prefix_hits"] == 15 and stats["prefix_tokens"] == 15 * 128
    own = sum(len(r.tokens) - 128 for r in others)
    made = stats["completion_tokens"] - before["completion_tokens"]
    assert own <= stats["computed_tokens"] - before["computed_tokens"] <= own + made


def test_prefixes_give_way_to_others(folder: Path, logits: Logits) -> None:
    requests = [Request(r.tokens, 5) for r in random_requests(11, shared=64) * 2]
    want = alone(folder, requests[:1], logits)
    with Engine(folder, kv_memory=7 * BYTES, slots=2, threads=1) as engine:
        found = outcomes(engine, requests, logits, at_once=True)
        stats = engine.stats()
    assert found[0] == found[16] == want[0]
    assert stats["pages_evicted"] > 0 and stats["prefix_hits"] > 0
    assert stats["pages_used"] == 0 and stats["pages_cached"] + stats["pages_free"] == 7


@pytest.mark.parametrize(
    ("after", "schema", "kv"),
    [(1, None, "f32"), (40, None, "i8"), (40, None, "f32"), (1, TEXT, "f32"), (40, TEXT, "i8")],
)
def test_a_generation_continues_from_a_file_with_the_same_bits(
    folder: Path, logits: Logits, tmp_path: Path, after: int, schema: dict[str, object] | None, kv: str
) -> None:
    (long,) = random_requests(31, 1, shared=100)
    request = Request(long.tokens, 80, Sampling(temperature=5.0, seed=3), ("never said",), schema)
    file, pieces = tmp_path / "saved", []

    def deliver(piece: Piece | None) -> None:
        pieces.append(piece)
        if len(pieces) == after:
            engine.save(whole, file)

    with Engine(folder, threads=1, kv=kv) as engine:
        ready = threading.Event()
        whole = engine.submit(request, lambda piece: (ready.wait(), deliver(piece))[1])
        ready.set()
        assert whole.wait(60) and whole.finish_reason in ("length", "stop") and whole.error is None
        assert len(pieces) > after + 3, "it was saved"
        again = engine.restore(file)
        assert again.text == "".join(p.text for p in pieces[after:] if p)
        assert again.cached_tokens >= 128, "its pages are known here"
        with pytest.raises(InputError, match="has ended"):
            engine.save(whole, file)
    with Engine(folder, threads=2, kv=kv) as other:
        elsewhere = other.restore(file)
        assert elsewhere.text == "".join(p.text for p in pieces[after:] if p)
        assert other.stats()["computed_tokens"] == elsewhere.completion_tokens - after, "nothing again"
        assert elsewhere.completion_tokens == whole.completion_tokens
    with Engine(folder, threads=1, kv_memory=4 * (BYTES if kv == "f32" else I8_BYTES), kv=kv) as small:
        assert small.stats()["pages"] == 4
        running = small.submit(Request((5, 6), 100, Sampling(temperature=30.0)))
        assert small.restore(file).text == "".join(p.text for p in pieces[after:] if p), "with preemption"
        running.wait()
    for generation in (again, elsewhere):
        assert logits[id(generation)] == logits[id(whole)][after:]


def test_bad_files_of_generations(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved"
    with Engine(folder, threads=1) as engine:
        made: list[Piece | None] = []

        def keep(piece: Piece | None) -> None:  # in the engine's thread: the generation cannot end meanwhile
            made.append(piece)
            if len(made) == 1:
                engine.save(running, file)

        with held(engine):
            running = engine.submit(Request((5,) * 70, None, Sampling(temperature=30.0)), keep)
        running.wait()
        good = file.read_bytes()
        rng = np.random.default_rng(0)
        mutants = [good[:-4], good + b"x", good[:50], b"", good.replace(b'"computed": ', b'"computed": 9')]
        for _ in range(40):
            at = int(rng.integers(0, good.index(b"\n")))
            mutants.append(good[:at] + bytes([int(rng.integers(256))]) + good[at + 1 :])
        for data in mutants:
            file.write_bytes(data)
            try:
                engine.restore(file).cancel()
            except RlxError as error:
                assert str(error)
        with pytest.raises(RlxError, match="not a valid saved generation"):
            file.write_bytes(good[:-4])
            engine.restore(file)
        with pytest.raises(ConfigError, match="another model"):
            file.write_bytes(good.replace(b'"model": "', b'"model": "0'))
            engine.restore(file)
        running.cancel()


def test_cancelled_requests_leave_nothing(folder: Path) -> None:
    rng = np.random.default_rng(3)
    with Engine(folder, slots=4, queue=100, threads=1) as engine:
        generations = [engine.submit(Request(r.tokens, 200)) for r in random_requests(1, 30)]
        for number in rng.permutation(len(generations)):
            for _ in range(int(rng.integers(0, 3))):
                next(iter(generations[0]), None)
            generations[number].cancel()
            generations[number].cancel()
        for generation in generations:
            assert generation.wait(60)
            list(generation)
            assert generation.finish_reason in ("cancelled", "stop", "length")
        stats = engine.stats()
        assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
        assert stats["cancelled"] + stats["finished"] == 30 and stats["cancelled"] > 0
        assert engine.submit(Request((5, 6), 3)).text, "it goes on"


def test_an_engine_says_what_a_model_says(folder: Path) -> None:
    model = rlx.llm.load(folder, threads=1)
    with Engine(model, threads=1) as engine:
        for text in ("Hello", "abc"):
            want = model.generate(text, max_tokens=20, temperature=1.5, seed=4)
            request = Request(tuple(engine.tokens(text)), 20, Sampling(temperature=1.5, seed=4))
            assert engine.submit(request).text == want
            np.testing.assert_allclose(engine.embed(engine.tokens(text)), model.embed(text), atol=1e-5)
        long = [int(t) for t in np.random.default_rng(0).integers(2, 95, 400)]
        np.testing.assert_allclose(engine.embed(long), model.embed(long), atol=1e-5)


def test_stop_words_and_schemas(folder: Path) -> None:
    with Engine(folder, threads=1) as engine:
        tokens = tuple(engine.tokens("abc"))
        how = Sampling(temperature=1.5, seed=1)
        whole = engine.submit(Request(tokens, 20, how)).text
        stopped = engine.submit(Request(tokens, 20, how, stop=(whole[4:7],)))
        assert stopped.text == whole[: whole.index(whole[4:7])] and stopped.finish_reason == "stop"
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        both = [
            engine.submit(Request(tokens, 60, how, schema=schema)),
            engine.submit(Request(tokens, 20, how)),
        ]
        assert both[0].text in ('{"a": true}', '{"a": false}') and both[0].finish_reason == "stop"
        assert both[1].text == whole, "another request keeps its own rules"
        with pytest.raises(ConfigError, match="schema"):
            engine.submit(Request(tokens, schema={"type": 7}))


def test_pieces_have_probabilities(folder: Path) -> None:
    with Engine(folder, threads=1) as engine:
        pieces = list(engine.submit(Request((5, 6, 7), 10, logprobs=3)))
    assert all(len(p.top) == 3 and p.top[0] == (p.token, p.logprob) for p in pieces if p.token is not None)
    assert all(p.logprob is not None and p.logprob < 0 for p in pieces if p.token is not None)


def test_deliver_is_called_in_the_engines_thread(folder: Path) -> None:
    got: list[Piece | None] = []
    threads: set[str] = set()
    done = threading.Event()

    def deliver(piece: Piece | None) -> None:
        got.append(piece)
        threads.add(threading.current_thread().name)
        if piece is None:
            done.set()

    with Engine(folder, threads=1) as engine:
        generation = engine.submit(Request((5, 6, 7), 10), deliver)
        assert done.wait(60)
        assert "".join(p.text for p in got[:-1] if p) == engine.submit(Request((5, 6, 7), 10)).text
        assert threads == {"rlx-engine"} and got.count(None) == 1 and generation.finish_reason
        with pytest.raises(InputError, match="deliver"):
            list(generation)


def test_an_error_of_one_request_is_its_own(folder: Path) -> None:
    def fail(piece: Piece | None) -> None:
        raise ValueError("a receiver that fails")

    with Engine(folder, threads=1) as engine:
        want = engine.submit(Request((5, 6, 7), 30)).text
        bad = engine.submit(Request((5, 6), 30), fail)
        good = engine.submit(Request((5, 6, 7), 30))
        assert good.text == want
        assert bad.wait(60) and bad.finish_reason == "error" and isinstance(bad.error, ValueError)
        stats = engine.stats()
        assert stats["failed"] == 1 and stats["pages_used"] == 0


def test_a_step_that_fails_harms_only_the_request_that_makes_it_fail(
    folder: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(21, 5)
    want = alone(folder, requests, logits)
    with Engine(folder, threads=1) as engine:
        step = engine._stream.step

        def sometimes(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
            wrong = (inputs["tokens"] == 95) & (inputs["at"] == 0)
            return step({**inputs, "tokens": np.where(wrong, 1000, inputs["tokens"])})

        monkeypatch.setattr(engine._stream, "step", sometimes)
        generations = [engine.submit(request) for request in requests]
        bad = engine.submit(Request((95, 3, 4), 5))
        texts = [g.text for g in generations]
        assert bad.wait(60) and bad.finish_reason == "error"
        with pytest.raises(RlxError):
            list(bad)
        assert [(g.finish_reason, t) for g, t in zip(generations, texts, strict=True)] == [
            w[:2] for w in want
        ]
        assert [logits[id(g)][-1] for g in generations] == [w[2][-1] for w in want]
        assert engine.stats()["pages_used"] == 0


def test_refusals(folder: Path) -> None:
    with pytest.raises(BudgetError, match="kv_memory is 100 bytes"):
        Engine(folder, kv_memory=100, threads=1)
    with pytest.raises(ConfigError, match="slots is 0"):
        Engine(folder, slots=0, threads=1)
    with Engine(folder, kv_memory=2 * BYTES, slots=1, queue=0, threads=1) as engine:
        for tokens, what in (
            ((), "0 tokens"),
            ((5,) * 128, "1 to 127"),
            ((5, 96), "token 96"),
            ((-1,), "-1"),
        ):
            with pytest.raises(InputError, match=what):
                engine.submit(Request(tokens))
        running = engine.submit(Request((5, 6), 120))
        with pytest.raises(QueueFull, match="try again later"):
            while running.finish_reason is None:
                engine.submit(Request((5, 6), 1)).wait()
        running.cancel()
        longest = Request((5,) * 127, sampling=Sampling(temperature=50.0))
        assert running.wait(60) and engine.submit(longest).wait(60), "it fits exactly"
    with pytest.raises(InputError, match="closed"):
        engine.submit(Request((5,)))


def endless(engine: Engine) -> Iterator[Generation]:
    for seed in range(5):
        yield engine.submit(Request((5, 6), None, Sampling(temperature=30.0, seed=seed)))


@pytest.mark.parametrize("drain", [True, False])
def test_closing(folder: Path, drain: bool) -> None:
    engine = Engine(folder, slots=2, threads=1)
    generations = list(endless(engine))
    engine.close(drain)
    reasons = {g.finish_reason for g in generations}
    assert reasons <= {"stop", "length"} if drain else "cancelled" in reasons
    assert engine.stats()["pages_used"] == 0


def test_an_engine_that_has_nothing_to_do_gives_memory_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, again = [], threading.Event()

    def give_back(system: object) -> None:
        given.append(threading.current_thread().name)
        again.set()

    monkeypatch.setattr(type(SYSTEM), "give_back_memory", give_back)
    with Engine(folder) as engine:
        given.clear()
        for times in (1, 2):
            again.clear()
            assert engine.submit(Request((5, 6, 7), max_tokens=2)).wait(30)
            assert again.wait(30) and len(given) == times
        time.sleep(3 * QUIET_SECONDS)
        assert given == ["rlx-engine"] * 2  # once after each time that it had worked
