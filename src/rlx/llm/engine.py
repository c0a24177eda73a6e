"""An engine: many requests at once on one model, each with the bits that it has alone.

One thread runs steps. A step computes a token of each request that generates, and parts of prompts that wait.
Keys and values are in pages; requests that begin with the same text share theirs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Unpack

import numpy as np

from rlx import config, progress
from rlx.api.options import LoadOptions
from rlx.errors import BudgetError, ConfigError, InputError, RlxError
from rlx.llm.batching.drafts import MOST_PROPOSED, Drafts, LookupDrafts, ModelDrafts, propose
from rlx.llm.batching.pages import PAGE, pages_for
from rlx.llm.batching.program import PREFILL_CHUNK, SLOTS, engine_tokens, key_of, program_of
from rlx.llm.batching.saved import Saved, model_mark, read_saved, write_saved
from rlx.llm.batching.schedule import Batch, Scheduler
from rlx.llm.batching.sequence import Answer, Deliver, Embedding, Generation, Request, Run
from rlx.llm.draft import LOOKUP, check_tokenizers
from rlx.llm.encoders.texts import no_text
from rlx.llm.model import LanguageModel
from rlx.llm.schema import Guide
from rlx.llm.source import Source, open_source
from rlx.llm.text import ModelText
from rlx.system import SYSTEM

_COUNTS = (
    "requests", "finished", "cancelled", "failed", "steps",
    "prompt_tokens", "completion_tokens", "computed_tokens", "draft_proposed", "draft_accepted",
)  # fmt: skip


_NONE = np.empty((0, 0), np.float32)
QUIET_SECONDS = 0.5  # without requests, after which memory that answers took is given back to the system


class QueueFull(RlxError):
    """An engine has as many waiting requests as it takes; try again later."""


class Engine(ModelText):
    """Runs requests on a model: `submit` them, from any thread.

    `model` is what `rlx.llm.load` takes, or a model that it loaded. `slots` requests run at the same time,
    `queue` more may wait. Keys and values take `kv_memory` bytes, but never more than all slots can use. A
    step computes at most `prefill_chunk` tokens of prompts. `activations` and `kv` (by default those of a
    loaded model), `draft`, `context` and `options` are as in `rlx.llm.load`; a draft model's keys and values
    are part of `kv_memory`.

    >>> import rlx
    >>> engine = Engine("zoo:smollm2")  # doctest: +SKIP
    >>> answer = engine.submit(Request(tuple(engine.prompt("Who wrote Hamlet?"))))  # doctest: +SKIP
    >>> "".join(piece.text for piece in answer)  # doctest: +SKIP
    'William Shakespeare wrote Hamlet.'
    """

    def __init__(
        self,
        model: LanguageModel | str | os.PathLike[str],
        *,
        draft: str | os.PathLike[str] | None = None,
        slots: int = SLOTS,
        kv_memory: int | str = "1GiB",
        queue: int = 64,
        prefill_chunk: int = PREFILL_CHUNK,
        activations: str | None = None,
        kv: str | None = None,
        context: int | None = None,
        notify: Callable[[str], None] | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        for name, value in (("slots", slots), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if queue < 0:
            raise ConfigError(f"queue is {queue}; it must be 0 or more")
        source = model.source if isinstance(model, LanguageModel) else open_source(model, notify)
        source = source.rounded(activations, kv)
        super().__init__(source)
        wanted = model.positions if isinstance(model, LanguageModel) and context is None else context
        self.positions = source.positions(wanted)
        proposed = 0 if draft is None else MOST_PROPOSED
        most = engine_tokens(source.config, self.positions, prefill_chunk, slots, proposed)
        prefill_chunk = most - slots - proposed
        self.slots, self.queue, self.prefill_chunk = slots, queue, prefill_chunk
        self.vocabulary_size = source.tensors["token_embd.weight"].shape[0]
        if draft is not None and source.config.is_encoder:
            raise ConfigError(f"{source.path} is an encoder, which has no draft")
        other = None if draft is None or draft == LOOKUP else self._draft_source(draft, notify)
        each = source.config.page_bytes + (0 if other is None else other.config.page_bytes)
        self._page_total = self._page_count(config.parse_bytes(kv_memory, "kv_memory"), PAGE * each)
        self.program = program_of(source, key_of(source, self.positions, most), options)
        self._stream = self.program.stream(sizes={"pages": self._page_total})
        self._drafts: Drafts | None = None if draft is None else LookupDrafts()
        if other is not None:
            positions = min(self.positions, other.config.context)
            table = other.tensors["token_embd.weight"].shape[0]
            self._drafts = ModelDrafts(
                program_of(other, key_of(other, positions, most), options),
                self._page_total,
                positions,
                most,
                min(table, self.vocabulary_size),
            )
        self._scheduler = Scheduler(self._page_total, slots, self.positions, prefill_chunk)
        self._new: deque[Run] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._has_worked = False  # since memory was given back to the system
        self._closing = self._giving_up = False
        self._broken: BaseException | None = None
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._thread = threading.Thread(target=self._serve, name="rlx-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        c = self.config
        name, pages = self.source.path.name, self._page_total
        return f"<engine of {name}: {c.architecture}, {self.slots} slots, {pages} pages>"

    def _draft_source(self, draft: str | os.PathLike[str], notify: Callable[[str], None] | None) -> Source:
        found = open_source(draft, notify).rounded(self.config.activations, self.config.kv)
        check_tokenizers(self.source, found)
        return found

    def _page_count(self, memory: int, each: int) -> int:
        count = min(memory // each, self.slots * pages_for(self.positions))
        if count < 1:
            raise BudgetError(
                f"kv_memory is {memory} bytes; {PAGE} tokens of {self.source.path} take {each}; give more"
            )
        return count

    @property
    def longest(self) -> int:
        """Tokens of the longest text that fits: prompt and answer."""
        return min(self.positions, self._page_total * PAGE)

    # -- what other threads call

    def submit(self, request: Request, deliver: Deliver | None = None) -> Generation:
        """Start a request. Its pieces are iterated over, or go to `deliver`, which the engine's thread calls,
        with None at the end. Raises QueueFull, or what is wrong with the request.
        """
        if self.config.is_encoder:
            raise no_text(self.source.path)
        self._check(request.tokens, self.longest - 1)
        return self._begin(request, deliver)

    def _begin(self, request: Request, deliver: Deliver | None, saved: Saved | None = None) -> Generation:
        most = self.longest - len(request.tokens)
        most = most if request.max_tokens is None else min(most, request.max_tokens)
        guide = None if request.schema is None else Guide(self.vocabulary, request.schema)
        generation = Generation(request, deliver, self._wake)
        run = Answer(generation, self, most, guide)
        if saved is not None:
            run.continue_from(saved)
        if run.made >= most:
            generation._end("length")
            return generation
        self._enter(run)
        return generation

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """A text as a vector; see `LanguageModel.embed`."""
        self._check(tokens, self.longest)
        run = Embedding(tokens, whole=self.config.is_encoder)
        self._enter(run)
        run.ended.wait()
        if run.error is not None:
            raise run.error
        return self.source.pooling(np.concatenate(run.features))

    def save(self, generation: Generation, path: str | os.PathLike[str]) -> None:
        """Write a generation that runs to a file, as it is between two tokens; it goes on. `restore`
        continues it from there, with the same bits, here or in another engine of the same model and machine.
        """
        found: list[Saved] = []
        self._do(lambda: found.append(self._snapshot(generation)))
        write_saved(path, found[0])

    def restore(self, path: str | os.PathLike[str], deliver: Deliver | None = None) -> Generation:
        """Continue a generation that `save` wrote: its pieces are those that follow. Else as `submit`."""
        saved = read_saved(path, self._mark, {name: self._state(name) for name in self._stream.states})
        self._check((*saved.request.tokens, *saved.made), self.longest)
        return self._begin(saved.request, deliver, saved)

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and what is used now."""
        now = self._scheduler
        free, cached = now.pool.free, now.tree.idle
        return {
            **self._counts,
            "prefix_hits": now.prefix_hits,
            "prefix_tokens": now.prefix_tokens,
            "preemptions": now.preemptions,
            "running": len(now.running),
            "waiting": len(self._new) + len(now.waiting),
            "slots": self.slots,
            "queue": self.queue,
            "pages": now.pool.count,
            "pages_free": free,
            "pages_cached": cached,
            "pages_used": now.pool.count - free - cached,
            "pages_evicted": now.tree.evicted,
        }

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End: with `drain` after all requests have ended, or `timeout` seconds, the others are cancelled."""
        with self._changed:
            self._closing = True
            self._giving_up = self._giving_up or not drain
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._giving_up = True
                self._changed.notify_all()
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *why: object) -> None:
        self.close(drain=why[0] is None)

    def _check(self, tokens: Sequence[int], most: int) -> None:
        if not 1 <= len(tokens) <= most:
            raise InputError(
                f"the request has {len(tokens)} tokens; this engine has room for 1 to {most}; give a larger "
                "context or more kv_memory"
            )
        wrong = [token for token in tokens if not 0 <= token < self.vocabulary_size]
        if wrong:
            raise InputError(f"token {wrong[0]} is not one of the {self.vocabulary_size} of this model")

    def _enter(self, run: Run) -> None:
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise InputError("the engine is closed; make another")
            now = self._scheduler
            if len(self._new) + len(now.waiting) + len(now.running) >= self.slots + self.queue:
                raise QueueFull(f"{self.slots} requests run and {self.queue} wait; try again later")
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(run.tokens)
            self._new.append(run)
            self._changed.notify_all()

    def _do(self, command: Callable[[], None]) -> None:
        """Have a function called by the engine's thread between two steps; raises what it raises."""
        if threading.current_thread() is self._thread:
            command()
            return
        done: Future[None] = Future()

        def called() -> None:
            try:
                command()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._changed:
            if self._closing:
                raise InputError("the engine is closed")
            self._commands.append(called)
            self._changed.notify_all()
        done.result()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the engine's thread

    def _serve(self) -> None:
        try:
            while self._next():
                self._scheduler.admit()
                self._load_saved()
                self._step()
        except BaseException as error:  # a bug: nobody may wait for ever
            with self._changed:
                self._broken = error
            self._end_all("error", error)
            raise
        finally:
            self._end_all("cancelled")

    def _next(self) -> bool:
        """Wait for something to do; False at the end."""
        now = self._scheduler
        with self._changed:
            while not (self._new or now.running or now.waiting or self._commands or self._closing):
                if not self._changed.wait(QUIET_SECONDS if self._has_worked else None):
                    SYSTEM.give_back_memory()
                    self._has_worked = False
            self._has_worked = True
            now.waiting += self._new
            self._new.clear()
            commands = list(self._commands)
            self._commands.clear()
            stop = self._giving_up or (self._closing and not now.running and not now.waiting)
        for command in commands:
            command()
        for run in [*now.running, *now.waiting]:
            if run.is_cancelled:
                self._end(run, "cancelled")
        return not stop

    def _end(self, run: Run, reason: str, error: BaseException | None = None) -> None:
        """Free what a run has, then tell it."""
        now = self._scheduler
        now.leave(run)
        if run in now.waiting:
            now.waiting.remove(run)
        self._counts[{"cancelled": "cancelled", "error": "failed"}.get(reason, "finished")] += 1
        self._tell(run, reason, error)

    def _tell(self, run: Run, reason: str, error: BaseException | None) -> None:
        try:
            run.end(reason, error)
        except Exception as failure:
            progress.info("the receiver of a generation failed at its end: %r", failure)

    def _end_all(self, reason: str, error: BaseException | None = None) -> None:
        now = self._scheduler
        with self._changed:
            self._closing = True
            runs = [*now.running, *now.waiting, *self._new]
            commands = list(self._commands)
            self._new.clear()
            self._commands.clear()
        for run in runs:
            self._end(run, reason, error)
        for command in commands:
            command()

    def _state(self, name: str) -> np.ndarray:
        """All pages of a state."""
        return self._stream.state(name).buffer.numpy()

    @cached_property
    def _mark(self) -> str:
        c = self.config
        kept = {"activations": c.activations, "kv": c.kv}
        rounded = [f"{name} {kind}" for name, kind in kept.items() if kind != "f32"]
        return model_mark(self.source.tensors, self.program.lir.target, *rounded)

    def _snapshot(self, generation: Generation) -> Saved:
        now = self._scheduler
        for run in (*now.running, *now.waiting):
            if isinstance(run, Answer) and run.generation is generation:
                pages = run.pages[: pages_for(run.computed)]
                states = {name: self._state(name)[pages] for name in self._stream.states}
                made, random = tuple(run.tokens[len(generation.request.tokens) :]), run.sampler.state
                return Saved(self._mark, generation.request, made, random, run.computed, states)
        raise InputError("the generation has ended, or another engine runs it")

    def _load_saved(self) -> None:
        """Runs that were saved get their pages again, as far as there is room; the rest is computed."""
        now = self._scheduler
        for run in now.running:
            if run.saved is None:
                continue
            saved, run.saved = run.saved, None
            now.grow(run, saved.computed)
            first, last = run.computed // PAGE, min(len(run.pages), pages_for(saved.computed))
            for name, value in saved.states.items():
                self._state(name)[run.pages[first:last]] = value[first:last]
            now.advance(run, max(min(saved.computed, last * PAGE) - run.computed, 0))

    def _step(self) -> None:
        """Compute tokens, and let their runs take what they wanted."""
        now = self._scheduler
        if self._drafts is not None:
            self._counts["draft_proposed"] += propose(self._drafts, now, self.longest)
        batch = now.batch()
        if not batch.parts:
            return
        try:
            found = self._stream.step(batch.inputs(now.table, self.config.is_encoder))
        except Exception as error:
            self._failed(batch, error)
            return
        self._counts["steps"] += 1
        logits, hidden = found.get("logits", _NONE), found["hidden"]  # encoders have no logits
        wanted = pooled = 0
        for run, count in batch.parts:
            end, last = wanted + len(run.wanted(count)), pooled + len(run.pooled(count))
            own, wanted, features, pooled = logits[wanted:end], end, hidden[pooled:last], last
            now.advance(run, count - len(run.proposals))
            self._counts["computed_tokens"] += count
            self._let_take(run, own, features)

    def _let_take(self, run: Run, logits: np.ndarray, features: np.ndarray) -> None:
        before, error = run.made, None
        try:
            reason = run.take(logits, features)
        except Exception as e:  # of this run alone: its schema, its receiver
            reason, error = "error", e
        self._counts["completion_tokens"] += run.made - before
        if run.proposals:
            self._counts["draft_accepted"] += run.accepted
            if reason is None:
                self._scheduler.checked(run, run.accepted)
        if reason is not None:
            self._end(run, reason, error)

    def _failed(self, batch: Batch, error: Exception) -> None:
        """A step failed, and states may be half written: all that is computed is lost. A run that was alone
        in the step fails; several come again one by one, so that a bad one harms no other.
        """
        self._stream.reset()
        self._scheduler.forget()
        alone = len(batch.parts) == 1
        for run, _ in batch.parts:
            run.suspect = True
            if alone:
                self._end(run, "error", error)
