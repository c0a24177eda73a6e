"""Speculative decoding: tokens and bits are those of an engine without a draft, whatever it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_decoders as tiny
from served import held
from tiny_chat import write_chat_model

import rlx
from rlx.cli.main import main
from rlx.errors import ConfigError
from rlx.llm import Engine, LanguageModel, Request, Sampling
from rlx.llm.batching.sequence import Answer
from rlx.llm.draft import PROPOSED, CheckedConversation, Lookup
from rlx.llm.sample import Sampler

MODEL = {**tiny.CONFIGS["llama"], "max_position_embeddings": 512}
PROMPT = tuple(int(t) for t in np.random.default_rng(3).integers(2, 95, 70))
HOWS = (Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=9, seed=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("target"), **{**MODEL, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("draft"), **MODEL)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The logits that tokens were chosen from, as bytes."""
    found: list[bytes] = []
    choose = Sampler.choose

    def kept(self: Sampler, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        found.append(logits.tobytes())
        return choose(self, logits, allowed)

    monkeypatch.setattr(Sampler, "choose", kept)
    return found


class Scripted:
    """A draft that knows the text which comes, or says something else at every place."""

    def __init__(self, text: Sequence[int], right: bool) -> None:
        self.text, self.right = text, right

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        known = self.text[len(tokens) : len(tokens) + count]
        made = [token if self.right else (token + 1) % 90 for token in known]
        return made + [0] * (count - len(made))


def expected(
    folder: Path, how: Sampling, seen: list[bytes], count: int = 40
) -> tuple[list[int], list[bytes]]:
    with Engine(folder, slots=1, context=256) as engine:
        pieces = list(engine.submit(Request(PROMPT, max_tokens=count, sampling=how)))
    bits = seen[:]
    seen.clear()
    return [piece.token for piece in pieces if piece.token is not None], bits


def checked(model: LanguageModel) -> CheckedConversation:
    assert isinstance(model.state, CheckedConversation)
    return model.state


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("itself", [True, False])
def test_tokens_and_bits_are_those_without_a_draft(
    folder: Path, small: Path, how: Sampling, itself: bool, seen: list[bytes]
) -> None:
    tokens, bits = expected(folder, how, seen)
    model = rlx.llm.load(folder, draft=folder if itself else small, context=256)
    assert list(model.stream_tokens(PROMPT, 40, how)) == tokens
    assert seen == bits
    proposed, accepted = model.drafted
    assert proposed > 0 and 0 <= accepted <= proposed


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("right", [True, False])
def test_drafts_that_are_always_right_or_always_wrong(
    folder: Path, how: Sampling, right: bool, seen: list[bytes]
) -> None:
    tokens, bits = expected(folder, how, seen)
    model = rlx.llm.load(folder, draft=folder, context=256)
    checked(model).draft = Scripted((*PROMPT, *tokens), right)
    assert list(model.stream_tokens(PROMPT, 40, how)) == tokens
    assert seen == bits
    proposed, accepted = model.drafted
    steps = len(seen) - accepted
    assert proposed == PROPOSED * steps
    if right:
        assert steps == -(-len(seen) // (PROPOSED + 1))
    else:
        assert accepted == 0


def test_a_second_text_and_the_end_of_the_context(folder: Path, seen: list[bytes]) -> None:
    model = rlx.llm.load(folder, draft=folder, context=80)
    plain = rlx.llm.load(folder, context=80)
    for prompt in (PROMPT, PROMPT[:30], (*PROMPT[:10], 9, 8, 7)):
        assert list(model.stream_tokens(prompt)) == list(plain.stream_tokens(prompt))
    np.testing.assert_allclose(model.logits(PROMPT), plain.logits(PROMPT), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.embed(PROMPT), plain.embed(PROMPT), rtol=1e-4, atol=1e-5)


def test_another_tokenizer_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other", **MODEL)
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"A":', '"zz":'))
    with pytest.raises(ConfigError, match=r"the draft .*other.* has another tokenizer than .*target"):
        rlx.llm.load(folder, draft=other)
    with pytest.raises(ConfigError, match="memory_limit does not go with a draft"):
        rlx.llm.load(folder, draft=folder, memory_limit="1GiB")


# -- engines


@pytest.fixture
def by_generation(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """The logits that tokens of each generation were chosen from, as bytes."""
    found: dict[int, list[bytes]] = {}
    choose = Answer.choose

    def kept(self: Answer, logits: np.ndarray) -> str | None:
        found.setdefault(id(self.generation), []).append(logits.tobytes())
        return choose(self, logits)

    monkeypatch.setattr(Answer, "choose", kept)
    return found


def requests(count: int) -> list[Request]:
    """Of several lengths and ways to choose; some begin alike, some repeat themselves."""
    rng, made = np.random.default_rng(count), []
    for i in range(count):
        own = tuple(int(t) for t in rng.integers(2, 95, int(rng.integers(1, 90))))
        tokens = (*PROMPT[: 65 * (i % 2)], *own, *(PROMPT[:9] * (i % 4)))
        made.append(
            Request(tokens, max_tokens=int(rng.integers(1, 40)), sampling=HOWS[i % 3], logprobs=i % 2 or None)
        )
    return made


def outcomes(engine: Engine, asked: list[Request], bits: dict[int, list[bytes]]) -> list[object]:
    running = [engine.submit(request) for request in asked]
    pieces = [list(one) for one in running]
    return [(p, one.finish_reason, bits[id(one)]) for p, one in zip(pieces, running, strict=True)]


@pytest.mark.parametrize(("slots", "chunk"), [(1, 256), (3, 20), (8, 64)])
@pytest.mark.parametrize("kind", ["itself", "small", "lookup"])
def test_engines_have_the_bits_of_those_without_a_draft(
    kind: str, slots: int, chunk: int, folder: Path, small: Path, by_generation: dict[int, list[bytes]]
) -> None:
    asked = requests(10)
    with Engine(folder, slots=1, context=256) as engine:
        want = outcomes(engine, asked, by_generation)
    draft = {"itself": folder, "small": small, "lookup": "lookup"}[kind]
    with Engine(folder, draft=draft, slots=slots, prefill_chunk=chunk, context=256, threads=2) as engine:
        assert outcomes(engine, asked, by_generation) == want
        found = engine.stats()
    assert found["draft_proposed"] >= found["draft_accepted"] >= (1 if kind == "itself" else 0)
    assert found["draft_proposed"] > 0 and found["pages_used"] == found["running"] == 0


def test_a_draft_saves_steps(folder: Path) -> None:
    """A model that proposes for itself is always right."""
    request = Request(PROMPT, max_tokens=41)
    with Engine(folder, draft=folder, slots=1, context=256) as engine:
        list(engine.submit(request))
        found = engine.stats()
        assert found["draft_accepted"] == found["draft_proposed"] == 32
        assert found["completion_tokens"] == 41 and found["steps"] == 1 + 8  # the prompt, then five at a time


@pytest.mark.parametrize("kind", ["itself", "lookup"])
def test_engines_with_few_pages(kind: str, folder: Path, by_generation: dict[int, list[bytes]]) -> None:
    """Runs leave and come again; proposals make nobody leave."""
    asked = [Request(PROMPT[: 40 + i], max_tokens=100, sampling=HOWS[i % 3]) for i in range(5)]
    with Engine(folder, slots=1, context=256) as engine:
        want = outcomes(engine, asked, by_generation)
        kv = 4 * engine.config.kv_numbers
    memory = 6 * 64 * kv * (2 if kind == "itself" else 1)
    draft = folder if kind == "itself" else kind
    with Engine(folder, draft=draft, slots=4, kv_memory=memory, context=256) as engine:
        assert engine.stats()["pages"] == 6
        assert outcomes(engine, asked, by_generation) == want
        assert engine.stats()["preemptions"] > 0


def test_a_draft_with_a_shorter_context(
    folder: Path, tmp_path: Path, by_generation: dict[int, list[bytes]]
) -> None:
    """Where it ends, the model goes on alone."""
    short = write_chat_model(tmp_path, **{**MODEL, "max_position_embeddings": 70})
    asked = [Request(PROMPT[:30], max_tokens=90), Request(PROMPT, max_tokens=9)]
    with Engine(folder, slots=1, context=256) as engine:
        want = outcomes(engine, asked, by_generation)
    with Engine(folder, draft=short, slots=2, context=256) as engine:
        assert outcomes(engine, asked, by_generation) == want
        assert 0 < engine.stats()["draft_proposed"] < 4 * 40


def test_saved_generations_go_on_with_a_draft(folder: Path, tmp_path: Path) -> None:
    request = Request(PROMPT, max_tokens=60)
    with Engine(folder, slots=1, context=256) as engine:
        want = [piece.token for piece in engine.submit(request)]
    with Engine(folder, draft=folder, slots=2, context=256) as engine:
        made: list[object] = []

        def keep(piece: object) -> None:  # in the engine's thread: the generation cannot end meanwhile
            made.append(piece)
            if len(made) == 20:
                engine.save(running, tmp_path / "saved")

        with held(engine):
            running = engine.submit(request, keep)
        running.wait()
        assert [piece.token for piece in engine.restore(tmp_path / "saved")] == want[20:]


def test_drafts_that_engines_refuse(folder: Path, tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other", **MODEL)
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"A":', '"zz":'))
    with pytest.raises(ConfigError, match=r"the draft .*other.* has another tokenizer"):
        Engine(folder, draft=other)


def test_lookup() -> None:
    lookup = Lookup()
    assert lookup.propose([5, 6, 7, 8, 5, 6, 7], 9) == [8, 5, 6, 7]
    assert lookup.propose([5, 6, 6, 1, 5, 6, 6, 2, 5, 6, 6], 1) == [2], "the last time counts"
    assert lookup.propose([5, 6, 7], 4) == lookup.propose([5], 4) == lookup.propose([], 4) == []
    assert lookup.propose([7, 7, 7, 7], 2) == [7], "what repeats itself at once"
    assert lookup.propose([1, 1, 256, 0, 256, 256, 65536], 3) == [], "tokens, not their bytes"
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
        found = lookup.propose(text, 2)
        places = [
            (n, i + n)
            for n in (4, 3)
            for i in range(len(text) - n)
            if n < len(text) and text[i : i + n] == text[-n:]
        ]
        best = max(places, default=None)
        assert found == ([] if best is None else text[best[1] : best[1] + 2])


@pytest.mark.parametrize("draft", ["itself", "lookup"])
def test_loaded_models_with_each_kind_of_draft(folder: Path, draft: str, seen: list[bytes]) -> None:
    tokens, bits = expected(folder, HOWS[1], seen)
    model = rlx.llm.load(folder, draft=folder if draft == "itself" else draft, context=256)
    assert list(model.stream_tokens(PROMPT, 40, HOWS[1])) == tokens and seen == bits


def test_chat_takes_a_draft(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for more in ([], ["--draft", str(folder)], ["--draft", "lookup"]):
        main(["chat", "--model", str(folder), "--max-tokens", "12", "--context", "128", *more, "HELLO"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2] != ""
