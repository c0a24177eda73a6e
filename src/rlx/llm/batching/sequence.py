"""One request of an engine: what was asked, what it gives, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import ConfigError, InputError
from rlx.llm.batching.pages import PAGE, Prefix, pages_for
from rlx.llm.sample import Sampler, Sampling, StopWords, log_softmax
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.llm.batching.saved import Saved
    from rlx.llm.schema import Guide
    from rlx.llm.text import ModelText, Schema

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """What is asked of an engine: tokens that follow these.

    `max_tokens` None means as many as fit the context. `stop` has words that end the text. With `logprobs`,
    each piece has the logarithm of its token's probability, and those of that many likeliest tokens.

    >>> Request((1, 2), logprobs=50)
    Traceback (most recent call last):
    rlx.errors.ConfigError: logprobs is 50; it must be between 0 and 20
    """

    tokens: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    schema: Schema | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be 0 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ConfigError(f"logprobs is {self.logprobs}; it must be between 0 and {MOST_LOGPROBS}")


@dataclass(frozen=True)
class Piece:
    """Text that a token completes (perhaps none yet); the last piece of a text may have no token."""

    text: str
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Deliver = Callable[[Piece | None], None]


class Generation:
    """The answer to a request, while it is made: iterate over its pieces. `Engine.submit` makes it."""

    def __init__(self, request: Request, deliver: Deliver | None, wake: Callable[[], None]) -> None:
        self.request = request
        self.finish_reason: str | None = None
        """Why it ended: "stop", "length", "cancelled" or "error"; None while it runs."""
        self.error: BaseException | None = None
        """What went wrong, if it ended with an error."""
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = len(request.tokens), 0, 0
        self.cancelled = False
        self._wake = wake
        self._pieces: SimpleQueue[Piece | None] | None = SimpleQueue() if deliver is None else None
        self._deliver: Deliver = self._pieces.put if self._pieces is not None else deliver  # type: ignore[assignment]
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<generation of {self.completion_tokens} tokens: {self.finish_reason or 'running'}>"

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they are made; raises what went wrong at the end. Once only."""
        if self._pieces is None:
            raise InputError("the pieces of this generation go to its function `deliver`")
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # another reader ends, too
        if self.error is not None:
            raise self.error

    @property
    def text(self) -> str:
        """The whole text; waits for its end."""
        return "".join(piece.text for piece in self)

    def cancel(self) -> None:
        """End it; its pages are free before the next step of the engine. Every thread may call this."""
        self.cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it ended, perhaps after a while."""
        return self._ended.wait(timeout)

    # -- the engine's side

    def _give(self, piece: Piece) -> None:
        self._deliver(piece)

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        if self.finish_reason is not None:
            return
        self.finish_reason, self.error = reason, error
        self._ended.set()
        self._deliver(None)


class Run:
    """Tokens in an engine: those of a request with those that follow, and the pages of what is computed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.computed = 0
        self.pages: list[int] = []
        self.nodes: list[Prefix] = []  # of the first pages, which others may share
        self.slot = -1
        self.suspect = False  # a step with this one and others failed
        self.saved: Saved | None = None  # pages that were computed elsewhere
        self.proposals: list[int] = []  # tokens that may follow, which the next step checks
        self.accepted = 0  # proposals of the last step that were right

    uses_prefixes = True
    whole = False  # its tokens are computed in one step

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def pages_at_first(self) -> int:
        """Pages of all its tokens and one more."""
        return pages_for(len(self.tokens) + 1)

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return 0

    def ahead(self, start: int, end: int) -> list[int]:
        """Tokens with proposals behind them."""
        count = len(self.tokens)
        return self.tokens[start:end] + self.proposals[max(start - count, 0) : max(end - count, 0)]

    def wanted(self, count: int) -> range:
        """Of the next `count` tokens, those whose logits are wanted."""
        return range(self.left - 1, count) if count >= self.left else range(0)

    def pooled(self, count: int) -> range:
        """Of the next `count` tokens, those whose features are wanted."""
        return range(0)

    def new_full_pages(self) -> range:
        """Pages that are full, and not known as prefixes yet."""
        return range(len(self.nodes), self.computed // PAGE) if self.uses_prefixes else range(0)

    def started(self, cached: int) -> None:
        """It got a slot; so many of its tokens are computed already."""

    @property
    def is_cancelled(self) -> bool:
        raise NotImplementedError

    @property
    def made(self) -> int:
        """Tokens that it has generated."""
        return 0

    def take(self, logits: np.ndarray, hidden: np.ndarray) -> str | None:
        """Outputs of the tokens that are wanted, perhaps none; the reason if that was the end."""
        raise NotImplementedError

    def end(self, reason: str, error: BaseException | None = None) -> None:
        raise NotImplementedError


class Embedding(Run):
    """A text of which only the features are wanted."""

    uses_prefixes = False

    def __init__(self, tokens: Sequence[int], whole: bool = False) -> None:
        super().__init__(tokens)
        self.whole = whole
        self.features: list[np.ndarray] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.is_given_up = False

    @property
    def pages_at_first(self) -> int:
        return pages_for(len(self.tokens))

    @property
    def is_cancelled(self) -> bool:
        return self.is_given_up

    def wanted(self, count: int) -> range:
        return range(0)

    def pooled(self, count: int) -> range:
        return range(count)

    def started(self, cached: int) -> None:
        self.features = []  # if it was preempted, they come again

    def take(self, logits: np.ndarray, hidden: np.ndarray) -> str | None:
        self.features.append(hidden.copy())
        return None if self.left else "stop"

    def end(self, reason: str, error: BaseException | None = None) -> None:
        self.error = InputError("the engine was closed") if reason == "cancelled" else error
        self.ended.set()


class Answer(Run):
    """A request that runs: its sampler, its text, its schema."""

    def __init__(self, generation: Generation, texts: ModelText, most: int, guide: Guide | None) -> None:
        request = generation.request
        super().__init__(request.tokens)
        self.generation, self.guide = generation, guide
        self.most = most  # tokens to generate, at the most
        self.has_started = False
        self.ends = texts.tokenizer.ends
        self.sampler = Sampler(request.sampling, request.tokens)
        self.decode, self.words = texts.tokenizer.decoder(), StopWords(request.stop)

    @property
    def is_cancelled(self) -> bool:
        return self.generation.cancelled

    def started(self, cached: int) -> None:
        if not self.has_started:
            self.generation.cached_tokens, self.has_started = cached, True

    @property
    def made(self) -> int:
        return self.generation.completion_tokens

    @property
    def room(self) -> int:
        return self.most - self.made

    def take(self, logits: np.ndarray, hidden: np.ndarray) -> str | None:
        """Choose a token, and others as long as the ones before are those that were proposed."""
        self.accepted = 0
        for row, proposed in zip(logits, (*self.proposals, None), strict=False):
            before = len(self.tokens)
            reason = self.choose(row)
            if self.tokens[before:] != [proposed]:
                return reason
            self.accepted += 1
            if reason is not None:
                return reason
        return None

    def choose(self, logits: np.ndarray) -> str | None:
        """The next token from its logits."""
        allowed = None if self.guide is None else self.guide.allowed(len(logits))
        token = self.sampler.choose(logits, allowed)
        if token in self.ends:
            return self.finish("stop")
        self.generation.completion_tokens += 1
        self.tokens.append(token)
        self.generation._give(self.piece(token, logits))
        if self.words.found:
            return "stop"
        if self.guide is not None:
            self.guide.take(token)
            if self.guide.done:
                return self.finish("stop")
        return self.finish("length") if self.made >= self.most else None

    def piece(self, token: int, logits: np.ndarray) -> Piece:
        text, count = self.words.add(self.decode(token)), self.generation.request.logprobs
        if count is None:
            return Piece(text, token)
        logs = log_softmax(logits)
        best = np.argsort(-logs, kind="stable")[:count]
        return Piece(text, token, float(logs[token]), tuple((int(i), float(logs[i])) for i in best))

    def continue_from(self, saved: Saved) -> None:
        """What was chosen before this run was saved: text and schema follow it."""
        for token in saved.made:
            self.tokens.append(token)
            self.sampler.seen.add(token)
            self.words.add(self.decode(token))
            if self.guide is not None:
                self.guide.take(token)
        self.generation.completion_tokens = len(saved.made)
        self.sampler.state = saved.random
        self.saved = saved

    def finish(self, reason: str) -> str:
        """The end of the text, with what was held back of it; the reason, as it turns out."""
        text = self.words.add(self.decode(None))
        if self.words.found:
            reason = "stop"
        else:
            text += self.words.rest()
        if text:
            self.generation._give(Piece(text, None))
        return reason

    def end(self, reason: str, error: BaseException | None = None) -> None:
        self.generation._end(reason, error)
