"""The next token from logits: the best one, or one drawn from the best ones. One seed, one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

import numpy as np

from rlx.errors import ConfigError, FormatError
from rlx.records import dataclass

_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 1 << 40),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the best one; then only the penalty matters.

    Logits of tokens that were there before are divided by `repetition_penalty` (multiplied if negative), as
    in other programs. Then, of the tokens sorted by probability, those stay that are among the first `top_k`
    (0: all), within the first that sum up to `top_p`, and at least `min_p` times as likely as the best.

    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
    rlx.errors.ConfigError: top_p is 1.5; it must be between 0 and 1
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                raise ConfigError(f"{name} is {value}; it must be between {low:g} and {high:g}")


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as options."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


class Sampler:
    """Chooses tokens one after the other.

    >>> logits = np.array([0.0, 2.0, 1.0], np.float32)
    >>> Sampler(Sampling()).choose(logits)
    1
    >>> hot = Sampler(Sampling(temperature=2.0, seed=1))
    >>> [hot.choose(logits) for _ in range(6)]
    [2, 0, 1, 0, 1, 1]
    """

    def __init__(self, sampling: Sampling, seen: Iterable[int] = ()) -> None:
        self.sampling, self.seen = sampling, set(seen)
        self.random = np.random.Generator(np.random.PCG64(sampling.seed))

    @property
    def state(self) -> dict[str, object]:
        """Where the random numbers are; another sampler of the same seed continues from there."""
        return dict(self.random.bit_generator.state)

    @state.setter
    def state(self, state: dict[str, object]) -> None:
        try:
            self.random.bit_generator.state = state
        except (TypeError, ValueError, KeyError) as error:
            raise FormatError(f"the state of random numbers is not one: {error}") from None

    def choose(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """The next token, of those that are `allowed` if that is given; it counts as seen from now on."""
        token = self._choose(logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf)))
        self.seen.add(token)
        return token

    def _choose(self, logits: np.ndarray) -> int:
        how = self.sampling
        if how.repetition_penalty != 1 and self.seen:
            logits = logits.copy()
            places = np.fromiter(self.seen, np.int64)
            old = logits[places]
            logits[places] = np.where(old < 0, old * how.repetition_penalty, old / how.repetition_penalty)
        if how.temperature == 0:
            return int(np.argmax(logits))
        order, odds = self._likely(logits.astype(np.float64) / how.temperature)
        sums = np.cumsum(odds)
        place = np.searchsorted(sums, self.random.random() * sums[-1], "right")
        return int(order[min(int(place), len(order) - 1)])

    def _likely(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that may be drawn, the best first, and their odds. Equal ones stay in order."""
        how = self.sampling
        order = np.argsort(-scores, kind="stable")
        if how.top_k:
            order = order[: how.top_k]
        odds = np.exp(scores[order] - scores[order[0]])
        if how.top_p < 1:
            before = np.cumsum(odds) - odds
            kept = max(int(np.count_nonzero(before < how.top_p * odds.sum())), 1)
            order, odds = order[:kept], odds[:kept]
        if how.min_p > 0:
            kept = max(int(np.count_nonzero(odds >= how.min_p)), 1)
            order, odds = order[:kept], odds[:kept]
        return order, odds


class StopWords:
    """Cuts a text at the first of some words, and holds back what may be the start of one.

    >>> stop = StopWords(["END"])
    >>> [stop.add(part) for part in ("one E", "N", "x E", "ND two")], stop.found
    (['one ', '', 'ENx ', ''], True)
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = [word for word in words if word]
        self.held, self.found = "", False

    def add(self, text: str) -> str:
        """What can be shown now."""
        self.held += text
        places = [at for word in self.words if (at := self.held.find(word)) >= 0]
        if places:
            self.found = True
            shown, self.held = self.held[: min(places)], ""
            return shown
        keep = 0
        for word in self.words:
            for length in range(min(len(word) - 1, len(self.held)), keep, -1):
                if self.held.endswith(word[:length]):
                    keep = length
                    break
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back, when the text ends."""
        shown, self.held = self.held, ""
        return shown


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities of all tokens, in f64; the last axis has the tokens.

    >>> log_softmax(np.zeros(4, np.float32)).round(4).tolist()
    [-1.3863, -1.3863, -1.3863, -1.3863]
    """
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True)))


def log_softmax_at(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logarithms of the probability of one token for each row, in f64.

    >>> log_softmax_at(np.zeros((1, 4), np.float32), np.array([2])).round(4).tolist()
    [-1.3863]
    """
    return np.asarray(log_softmax(logits)[np.arange(len(logits)), tokens])


def perplexity_of(logs: np.ndarray) -> float:
    return math.exp(-float(np.mean(logs))) if len(logs) else math.nan
