"""Speculative decoding: tokens and bits are those of an engine without a draft, whatever it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_decoders as tiny
from tiny_chat import write_chat_model

import rlx
from rlx.cli.main import main
from rlx.errors import ConfigError
from rlx.llm import Engine, LanguageModel, Request, Sampling
from rlx.llm.draft import PROPOSED, CheckedConversation
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
        self.text, self.right, self.positions = text, right, 512

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        token = self.text[len(tokens)] if len(tokens) < len(self.text) else 0
        return np.eye(128, dtype=np.float32)[token if self.right else (token + 1) % 90]


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


def test_chat_takes_a_draft(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for more in ([], ["--draft", str(folder)]):
        main(["chat", "--model", str(folder), "--max-tokens", "12", "--context", "128", *more, "HELLO"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
