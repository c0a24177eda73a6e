"""A request on its way: from the event loop to the engine's thread, and its pieces back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from rlx import progress
from rlx.llm.batching.sequence import Deliver, Generation, Piece
from rlx.llm.schema import SchemaError
from rlx.serve.metrics import Metrics
from rlx.serve.refusal import Refusal
from rlx.serve.requests import SCHEMA

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class Waiting:
    """An HTTP request with its body. What it waits for ends when its client leaves or its time is up."""

    def __init__(self, http: HttpRequest, deadline: float) -> None:
        self._http, self._deadline = http, deadline
        self._left = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`."""
        task = asyncio.ensure_future(work)
        left = max(self._deadline - asyncio.get_running_loop().time(), 0)
        try:
            await asyncio.wait((task, self._left), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._left.done():
                raise ClientLeft
            raise Refusal(504, "the answer took longer than the server's --timeout", code="timeout")
        finally:
            task.cancel()

    def close(self) -> None:
        self._left.cancel()


class Job:
    """One generation. Whatever happens, `close` is called in the end: it frees the slot."""

    def __init__(self, waiting: Waiting, metrics: Metrics) -> None:
        self.waiting, self._metrics = waiting, metrics
        self._start, self._begun, self._closed = time.perf_counter(), False, False
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the request was submitted"
        return self._generation

    def submit(self, submit: Callable[[Deliver], Generation]) -> None:
        """Start the generation. That may take a while: this is called in a thread of its own."""
        if self._closed:
            return
        self._generation = submit(self._deliver)
        if self._closed:  # meanwhile, when there was no generation to cancel
            self._generation.cancel()

    def _deliver(self, piece: Piece | None) -> None:
        """Called in the engine's thread. The server closes the engine before it closes the loop."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def next(self) -> list[Piece | None]:
        """Pieces that are there, one or more; the last one is None at the end, where a failure is raised."""
        if self._pieces.empty():
            found = [await self.waiting.wait(self._pieces.get())]
        else:
            found = []
        while not self._pieces.empty():
            found.append(self._pieces.get_nowait())
        if not self._begun:
            self._begun = True
            self._metrics.first.add(time.perf_counter() - self._start)
        if found[-1] is None and self.generation.finish_reason not in ("stop", "length"):
            raise self._failure()
        return found

    def _failure(self) -> Refusal:
        if self.generation.finish_reason == "cancelled":
            return Refusal(503, "the server stops; the answer was not finished", code="stopping")
        error = self.generation.error
        if isinstance(error, SchemaError):
            return Refusal(400, f"{SCHEMA}: {error}", param=SCHEMA)
        logging.getLogger(progress.NAME).error("the engine failed: %s", error, exc_info=error)
        return Refusal(500, "the engine failed; the server's log says why")

    def close(self) -> None:
        """Cancel what is not finished, and count what was done."""
        if self._closed:
            return
        self._closed = True
        self.waiting.close()
        generation = self._generation
        if generation is None:
            return
        if generation.finish_reason is None:
            generation.cancel()
            self._metrics.cancelled.add(1)
        self._metrics.prompt.add(generation.prompt_tokens)
        self._metrics.cached.add(generation.cached_tokens)
        self._metrics.made.add(generation.completion_tokens)
