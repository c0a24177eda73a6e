"""SmolLM2 from the zoo: greedy answers against an f32 computation with NumPy of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from rlx.llm import LanguageModel
from rlx.llm.sample import log_softmax_at

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Who wrote Hamlet?",
    "What is 12 times 9?",
    "Translate 'good morning' to Spanish.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Describe a rainy day in one sentence.",
    "What does HTTP stand for?",
    "Tell me a joke about cats.",
    "How do I boil an egg?",
    "Name five planets.",
    "What is a prime number?",
    "Summarise the plot of Cinderella.",
    "Which animals lay eggs?",
    "Write a Python function that adds two numbers.",
    "What should I pack for a hike?",
    "Is a tomato a fruit?",
)
NEAR = 1e-4  # logits that are nearer than this may change places


@pytest.fixture(scope="module")
def path(zoo_path: Callable[[str], Path]) -> Path:
    return zoo_path("smollm2")


@pytest.fixture(scope="module")
def model(path: Path) -> LanguageModel:
    return rlx.llm.load(path, context=512)


@pytest.fixture(scope="module")
def reference(path: Path) -> Callable[[list[int]], np.ndarray]:
    config, weights = tiny.read_gguf(path)
    return lambda tokens: tiny.logits(config, weights, tokens, np.float32)


def near_ties(
    model: LanguageModel, reference: Callable[[list[int]], np.ndarray], prompt: str, count: int
) -> int:
    """How many greedy tokens are not the reference's, which is only allowed if two are equally good."""
    tokens = model.prompt(prompt)
    made = list(model.stream_tokens(tokens, count))
    logits = reference([*tokens, *made])[len(tokens) - 1 : -1]
    differ = 0
    for token, row in zip(made, logits, strict=True):
        best = int(row.argmax())
        assert best == token or row[best] - row[token] < NEAR, (prompt, best, token)
        differ += best != token
    return differ


def test_a_greedy_answer(model: LanguageModel, reference: Callable[[list[int]], np.ndarray]) -> None:
    assert model.chat(PROMPTS[0]) == "The capital of France is Paris."
    assert near_ties(model, reference, PROMPTS[0], 8) == 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers(
    model: LanguageModel, reference: Callable[[list[int]], np.ndarray], prompt: str
) -> None:
    assert near_ties(model, reference, prompt, 64) == 0


def test_what_two_texts_share_is_computed_once(model: LanguageModel) -> None:
    first, second = model.prompt("Say yes."), model.prompt("Say no.")
    alone = model.state.run(second, 0, "logits", last=True)[0].copy()
    model.state.logits(first)
    shared = model.state.common(second)
    assert 10 < shared < len(second)
    assert np.abs(model.state.logits(second) - alone).max() < 1e-3


def test_looking_up_what_is_repeated(path: Path) -> None:
    """Where a text is copied, most of what followed before is right; the answer stays what it was."""
    text = (
        "The treaty was signed on 13 December 2007 and entered into force on 1 December 2009 in all states."
    )
    answers, steps = [], []
    for draft in (None, "lookup"):
        with rlx.llm.Engine(path, draft=draft, slots=1, context=512) as engine:
            prompt = engine.prompt(f"Repeat this text word for word: {text}")
            answers.append(engine.submit(rlx.llm.Request(tuple(prompt), max_tokens=40)).text)
            found = engine.stats()
            steps.append(found["steps"])
    assert answers[0] == answers[1] and "13 December 2007" in answers[0]
    assert steps[1] < 0.6 * steps[0] and found["draft_accepted"] > 10


def test_numbers(model: LanguageModel) -> None:
    text = "It was the best of times, it was the worst of times."
    logits = model.logits(text)
    assert logits.shape == (len(model.tokens(text)), 49152)
    logs = logits - np.log(np.exp(logits.astype(float)).sum(axis=1, keepdims=True))
    want = np.exp(-np.mean([logs[i, t] for i, t in enumerate(model.tokens(text)[1:])]))
    assert model.perplexity(text) == pytest.approx(want, rel=1e-5)
    cat, kitten, law = (model.embed(t) for t in ("A cat sleeps.", "A kitten sleeps.", "Article 7 of the law"))
    assert cat @ kitten > cat @ law and np.linalg.norm(cat) == pytest.approx(1)


@pytest.mark.slow
def test_perplexity_is_that_of_f32(
    model: LanguageModel, reference: Callable[[list[int]], np.ndarray]
) -> None:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))[: 1 << 14]
    tokens, window = model.tokens(text), 256
    parts = [tokens[at : at + window] for at in range(0, len(tokens) - 1, window)]
    logs = [log_softmax_at(reference(part)[:-1], np.array(part[1:])) for part in parts if len(part) > 1]
    want = np.exp(-np.concatenate(logs).mean())
    assert model.perplexity(tokens, window) == pytest.approx(want, rel=1e-4)
