"""Answers as server-sent events, one for each piece of text."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlx.llm.batching.sequence import Piece
from rlx.serve.answers import ChatAnswer
from rlx.serve.job import ClientLeft, Job
from rlx.serve.refusal import Refusal, json_bytes

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_LAST_WORDS = 1.0  # seconds to tell a client why its stream ends
_END = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response that sends pieces as they come. An error after the start is an event of its own."""

    def __init__(self, job: Job, answer: ChatAnswer, usage: bool) -> None:
        self._job, self._answer, self._usage = job, answer, usage
        self._characters = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send_all(send)
        except Refusal as refusal:
            await _last_words(scope, send, refusal)
        finally:
            self._job.close()

    async def _send_all(self, send: Send) -> None:
        job, answer = self._job, self._answer
        first = answer.first()
        if first is not None:
            await job.waiting.wait(_send(send, _event(first)))
        ended = False
        while not ended:
            events = []
            for piece in await job.next():
                if piece is not None:
                    events += self._events(piece)
                    continue
                ended = True
                events.append(_event(answer.last(job.generation.finish_reason)))
                events += [_event(answer.counts(job.generation))] if self._usage else []
                events.append(_END)
            if events:
                await job.waiting.wait(_send(send, b"".join(events), more=not ended))

    def _events(self, piece: Piece) -> list[bytes]:
        """No event for text that is held back (half a character, a stop word), unless logprobs are wanted."""
        if not piece.text and not self._answer.chances:
            return []
        before, self._characters = self._characters, self._characters + len(piece.text)
        return [_event(self._answer.chunk(piece, before))]


def _event(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _last_words(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Tell why a stream ends. A client that does not even read that is cut off."""
    try:
        async with asyncio.timeout(_LAST_WORDS):
            await _send(send, _event(refusal.body()), more=False)
    except TimeoutError:
        scope["state"]["abort"]()
        raise ClientLeft from None
