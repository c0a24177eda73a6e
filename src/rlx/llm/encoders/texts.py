"""An encoder that is ready to run: texts of any lengths in one step, each with the bits that it has alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import UnsupportedError
from rlx.llm.batching.pages import PAGE, pages_for

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

_TOKENS = 1024  # of a step: more would only need more memory
_TEXTS = 64  # of a step: each has a page of its own at least


def no_text(path: object) -> UnsupportedError:
    """What asking an encoder for text raises."""
    return UnsupportedError(f"{path} is an encoder: it turns texts to vectors (embed) and writes none")


def tokens_of_a_step(positions: int) -> int:
    """How many tokens a step has at the most; a text is in one step."""
    return max(_TOKENS, positions)


class EncodedTexts:
    """Features of texts. It takes the place of a conversation where the model is an encoder."""

    def __init__(self, program: CompiledProgram, positions: int, path: str) -> None:
        self.positions, self.path, self.most = positions, path, tokens_of_a_step(positions)
        self.tokens: list[int] = []  # none are kept for another text
        self.stream = program.stream(sizes={"pages": pages_for(self.most) + _TEXTS})

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """An encoder has none."""
        raise no_text(self.path)

    def every(self, tokens: Sequence[int], output: str) -> np.ndarray:
        """The features of all tokens of a text."""
        if output != "hidden":
            return self.logits(tokens)
        return next(self.features([tokens]))

    def features(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Features [tokens, width] of each text, in their order."""
        part: list[Sequence[int]] = []
        for tokens in texts:
            if len(part) == _TEXTS or sum(map(len, part)) + len(tokens) > self.most:
                yield from self._step(part)
                part = []
            part.append(tokens)
        if part:
            yield from self._step(part)

    def _step(self, texts: list[Sequence[int]]) -> Iterator[np.ndarray]:
        sizes = [len(tokens) for tokens in texts]
        ends = np.cumsum(sizes)
        table = np.zeros((len(texts), pages_for(self.positions)), np.int64)
        first = 0
        for row, size in zip(table, sizes, strict=True):
            count = pages_for(size)
            row[:count] = np.arange(first, first + count)
            first += count
        slots, at = np.repeat(np.arange(len(texts)), sizes), np.concatenate([np.arange(n) for n in sizes])
        hidden = self.stream.step(
            {
                "new": len(at),
                "features": len(at),
                "tokens": np.concatenate([np.asarray(tokens, np.int64) for tokens in texts]),
                "at": at,
                "slots": slots,
                "places": table[slots, at // PAGE] * PAGE + at % PAGE,
                "table": table,
                "lengths": np.repeat(sizes, sizes),
                "pooled": np.arange(len(at)),
            }
        )["hidden"]
        for end, size in zip(ends, sizes, strict=True):
            yield hidden[end - size : end].copy()
