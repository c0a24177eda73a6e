"""The HTTP application: who may ask, what is where, and what the log and the counters say of it."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from rlx import progress
from rlx.llm.engine import QueueFull
from rlx.serve.body import discard
from rlx.serve.endpoints import Endpoints
from rlx.serve.job import ClientLeft
from rlx.serve.keys import Keys
from rlx.serve.metrics import Metrics
from rlx.serve.refusal import Json, Refusal

_LEFT = 499  # the status in the log where nobody was there to get an answer
_RETRY_SECONDS = 1
_OPEN = ("/", "/page.css", "/page.js", "/health")  # paths that need no key
_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")} | {
    "/page.js": ("page.js", "text/javascript")
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
_ALWAYS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_LOCAL_NAME = re.compile(r"(?:.*\.)?localhost\.?", re.I)


class App:
    """An ASGI application."""

    def __init__(self, endpoints: Endpoints, metrics: Metrics, keys: Keys, local: bool) -> None:
        self._endpoints, self._metrics, self._keys = endpoints, metrics, keys
        self._local = local  # whether it listens to this machine only
        self.draining = False
        self._router = Router(
            [
                Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
                Route("/v1/completions", endpoints.completion, methods=["POST"]),
                Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
                Route("/v1/models", endpoints.models, methods=["GET"]),
                Route("/v1/models/{name:path}", endpoints.one_model, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                *(Route(path, self.page, methods=["GET"]) for path in _FILES),
            ],
            redirect_slashes=False,
        )
        self._paths = {route.path for route in self._router.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]  # the server starts with lifespan="off", ws="none"
        start, status, unread = time.perf_counter(), _LEFT, True

        async def receive_and_note() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if unread and status >= 400 and status != 408:
                    await discard(scope, receive)
                message["headers"] = [*message["headers"], *_ALWAYS]
            await send(message)

        scope["app"] = self  # so that the router raises where it has no route
        try:
            await self._answer(scope, receive_and_note, send_and_note)
        except (ClientLeft, ClientDisconnect):
            status = _LEFT
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.add(1, path, str(status))
            self._metrics.seconds.add(seconds)
            client = scope["client"][0] if scope.get("client") else "-"
            progress.info("%s %s %a %d %.3f s", client, scope["method"], scope["path"][:200], status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What a route answers, or a refusal."""
        try:
            self._admit(HttpRequest(scope))
            await self._router(scope, receive, send)
            return
        except (ClientLeft, ClientDisconnect):
            raise
        except Refusal as found:
            refusal = found
        except QueueFull as found:
            headers = {"Retry-After": str(_RETRY_SECONDS)}
            refusal = Refusal(429, found.message, code="queue_full", headers=headers)
        except HTTPException as found:
            what = f"{scope['method']} {scope['path'][:200]}: {found.detail}"
            refusal = Refusal(found.status_code, what, headers=found.headers)
        except Exception as error:
            logging.getLogger(progress.NAME).error("a request failed: %s", error, exc_info=error)
            refusal = Refusal(500, "the server failed; its log says why")
        await refusal.response()(scope, receive, send)

    def _admit(self, http: HttpRequest) -> None:
        """Refuse who may not ask."""
        if self._local and not self._keys and not is_local(http.headers.get("host", "")):
            # A page of another site may have its name lead here, and would then read the answers.
            raise Refusal(
                403, "without API keys this server answers to the name localhost only; see --api-key-file"
            )
        if http.url.path in _OPEN:
            return
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        if not self._keys.accept(key.strip() if scheme.lower() == "bearer" else None):
            raise Refusal(
                401,
                "no valid API key; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def health(self, http: HttpRequest) -> Response:
        if self.draining:
            raise Refusal(503, "the server stops", code="stopping")
        return Json({"status": "ok"})

    async def metrics(self, http: HttpRequest) -> Response:
        text = self._metrics.text(self._endpoints.engine.stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, http: HttpRequest) -> Response:
        name, kind = _FILES[http.url.path]
        return Response(_file(name), headers=_PAGE_HEADERS, media_type=kind)


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / "page" / name).read_bytes()


def is_local(host: str) -> bool:
    """Whether a Host header has an address or localhost, which no other site can have as its name.

    >>> is_local("127.0.0.1:8000"), is_local("[::1]:80"), is_local("localhost"), is_local("evil.example:8000")
    (True, True, True, False)
    """
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if _LOCAL_NAME.fullmatch(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
