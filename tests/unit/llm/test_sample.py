"""Sampling: what may be drawn, how often, and that a seed decides."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.errors import ConfigError
from rlx.llm.sample import Sampler, Sampling, StopWords

LOGITS = np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05], np.float32))


def drawn(count: int = 400, **how: float) -> list[int]:
    sampler = Sampler(Sampling(**{"temperature": 1.0, **how}))  # type: ignore[arg-type]
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_greedy_takes_the_first_of_the_best() -> None:
    assert Sampler(Sampling()).choose(np.array([1, 3, 3], np.float32)) == 1


def test_frequencies_are_the_probabilities() -> None:
    counts = np.bincount(drawn(4000), minlength=5) / 4000
    assert np.abs(counts - np.exp(LOGITS)).max() < 0.03


def test_what_may_be_drawn() -> None:
    assert set(drawn(top_k=2)) == {1, 2}
    assert set(drawn(top_p=0.65)) == {1, 2}
    assert set(drawn(top_p=0.75)) == {1, 2, 3}
    assert set(drawn(min_p=0.45)) == {1, 2, 3}
    assert set(drawn(top_k=1, temperature=5.0)) == {1}
    assert set(drawn(temperature=0.01)) == {1}
    assert set(drawn(top_p=0.0)) == {1}


def test_a_seed_decides() -> None:
    assert drawn(seed=3) == drawn(seed=3) != drawn(seed=4)


def test_repetition_penalty() -> None:
    logits = np.array([1.0, 0.9, -1.0], np.float32)
    assert Sampler(Sampling(repetition_penalty=1.2), [0]).choose(logits) == 1
    assert Sampler(Sampling(repetition_penalty=1.05), [0]).choose(logits) == 0
    sampler = Sampler(Sampling(repetition_penalty=1.2))
    assert [sampler.choose(logits) for _ in range(2)] == [0, 1], "what was chosen counts"
    assert logits.tolist() == pytest.approx([1.0, 0.9, -1.0]), "logits of the caller stay"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 1.1), ("min_p", float("nan")), ("top_k", -1), ("repetition_penalty", 0)],
)
def test_values_that_make_no_sense(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be between"):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [1, 2, 3, 100])
def test_stop_words_however_the_text_is_cut(sizes: int) -> None:
    text = "one two<|en|>three<|end|>four"
    words = StopWords(["<|end|>", "fou"])
    shown = []
    for at in range(0, len(text), sizes):
        shown.append(words.add(text[at : at + sizes]))
        if words.found:
            break
    assert "".join(shown) == "one two<|en|>three" and words.found
    kept = StopWords(["xyz"])
    assert kept.add("abcxy") + kept.rest() == "abcxy" and not kept.found
