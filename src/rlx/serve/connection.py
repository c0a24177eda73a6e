"""One connection of a client: uvicorn's, with limits on those who connect and then say or read nothing."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""How long the head of a request may take."""


class Connection(H11Protocol):
    """uvicorn waits for the head of a request for ever, and for the last bytes of an answer to be read."""

    _head_until: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope["state"]["abort"] = self.transport.abort  # the task of the request starts later
        if self.cycle is not None and not self.cycle.response_complete and self._head_until is not None:
            self._head_until.cancel()
            self._head_until = None

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_until is not None:
            self._head_until.cancel()

    def _expect_head(self) -> None:
        """Also the answer must have been read by then, where the connection ends with it."""
        if self._head_until is not None:
            self._head_until.cancel()
        self._head_until = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
