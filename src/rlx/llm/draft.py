"""Speculative decoding: a small model proposes tokens, the large one computes what follows each in one step.

The large model runs the paged program of engines, whose bits do not depend on how many tokens a step has. So
the logits of every token, and what is chosen from them, are those that it has without proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlx.errors import ConfigError
from rlx.llm.batching.pages import pages_for
from rlx.llm.source import AT_ONCE, Source

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram
    from rlx.runtime.stream import Stream

PROPOSED = 4
"""Tokens that a draft proposes at a time."""
MOST = AT_ONCE + PROPOSED  # tokens of a step


LOOKUP = "lookup"
"""The name of the draft that needs no model."""
_LONGEST, _SHORTEST = 4, 3  # tokens in common with what came before; fewer are mostly followed by others


class Draft(Protocol):
    """What proposes tokens."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to so many tokens that may follow."""


class NoDraft:
    """Proposes nothing: a conversation in pages, and no more."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return []


class Lookup:
    """Proposes what followed when the newest tokens were there before: texts often repeat themselves.

    >>> Lookup().propose([1, 2, 3, 4, 9, 1, 2, 3], 2)
    [4, 9]
    """

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        text = np.array(tokens, np.int32)
        for length in range(min(_LONGEST, len(text) - 1), _SHORTEST - 1, -1):
            data, newest = text[:-1].tobytes(), text[-length:].tobytes()
            at = data.rfind(newest)
            while at >= 0 and at % text.itemsize:  # bytes of two tokens
                at = data.rfind(newest, 0, at + len(newest) - 1)
            if at >= 0:
                first = at // text.itemsize + length
                return text[first : first + count].tolist()
        return []


class Conversing(Protocol):
    """A model with the text that it has read so far."""

    positions: int

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of what follows the last token."""


class Likeliest:
    """Proposes the tokens that a small model takes for likeliest."""

    def __init__(self, model: Conversing, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(min(count, self.model.positions - len(tokens))):
            found.append(int(np.argmax(self.model.logits(found)[: self.vocabulary])))
        return found[len(tokens) :]


def check_tokenizers(source: Source, draft: Source) -> None:
    """Refuse a draft whose tokens are not those of the model."""
    if draft.config.is_encoder:
        raise ConfigError(f"the draft {draft.path} is an encoder, which writes no text")
    own, other = source.tokenizer, draft.tokenizer
    if list(own.tokens) != list(other.tokens) or own.ends != other.ends:
        raise ConfigError(
            f"the draft {draft.path} has another tokenizer than {source.path}: {len(other.tokens)} and "
            f"{len(own.tokens)} tokens; give a draft of the same family"
        )


class Stepped(Protocol):
    """Tokens whose keys and values a stream has."""

    stream: Stream
    tokens: list[int]


def step(conversation: Stepped, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
    """A step of a conversation. One that fails or is interrupted may have written part of the keys and
    values: all of them are computed again later.
    """
    try:
        return conversation.stream.step(inputs)
    except BaseException:
        conversation.tokens.clear()
        conversation.stream.reset()
        raise


class CheckedConversation:
    """As `Conversation`, on the paged program: logits after the last token come with those after tokens that
    the draft proposes behind it, and are kept until they are asked for.
    """

    def __init__(self, program: CompiledProgram, positions: int, draft: Draft) -> None:
        self.stream = program.stream(sizes={"pages": pages_for(positions)})
        self.positions, self.draft = positions, draft
        self.table = np.arange(pages_for(positions), dtype=np.int64)[None]
        self.tokens: list[int] = []  # whose keys and values are there, proposals, too
        self.known: dict[int, np.ndarray] = {}  # number of tokens -> logits of what follows
        self.proposed = self.accepted = 0

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start are in the pages."""
        least = min(len(tokens), len(self.tokens))
        return next((i for i in range(least) if tokens[i] != self.tokens[i]), least)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of what follows the last token."""
        count, same = len(tokens), self.common(tokens)
        if same == count and count in self.known:
            self.accepted += 1
            return self.known[count]
        guessed = self.draft.propose(tokens, min(PROPOSED, self.positions - count))
        self.proposed += len(guessed)
        rows = self._run([*tokens, *guessed], min(same, count - 1), count - 1, "logits")
        self.known = dict(enumerate(rows, count))
        return self.known.pop(count)

    def every(self, tokens: Sequence[int], output: str) -> np.ndarray:
        """An output for all tokens."""
        self.known = {}
        return self._run(list(tokens), 0, 0, output)

    def _run(self, tokens: list[int], past: int, first: int, output: str) -> np.ndarray:
        """An output for the tokens from `first` on; those before `past` are computed already."""
        del self.tokens[past:]
        found = []
        for start in range(past, len(tokens), MOST):
            part = np.array(tokens[start : start + MOST], np.int64)
            at = np.arange(start, start + len(part))
            asked = np.arange(max(first - start, 0), len(part))
            none = np.empty(0, np.int64)
            wanted, pooled = (asked, none) if output == "logits" else (none, asked)
            sizes = {"new": len(part), "answers": len(wanted), "features": len(pooled)}
            arrays = {
                "tokens": part,
                "at": at,
                "slots": np.zeros_like(at),
                "wanted": wanted,
                "pooled": pooled,
            }
            out = step(self, {**sizes, **arrays, "places": at, "table": self.table})
            self.tokens += part.tolist()
            if len(asked):
                found.append(out[output].copy())
        return found[0] if len(found) == 1 else np.concatenate(found)
