"""Bodies of requests: JSON of limited size that arrives in limited time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from rlx.files import Json
from rlx.serve.fields import parse_object
from rlx.serve.refusal import Refusal

MOST_BODY = 4 << 20
"""Bytes of a body."""
_DISCARDED = 16 << 20
_DISCARD_SECONDS = 5.0


async def read_json(http: HttpRequest, deadline: float) -> Json:
    """The JSON object in the body of a request."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form or plain text may come from any page in a browser
        raise Refusal(415, f"the content type is {kind[:100]!r}; it must be application/json")
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MOST_BODY:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout_at(deadline):
            async for part in http.stream():
                body += part
                if len(body) > MOST_BODY:
                    raise _too_large()
    except TimeoutError:
        raise Refusal(408, "the body did not arrive within the server's --timeout", code="timeout") from None
    return parse_object(body)


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {MOST_BODY} bytes", code="body_too_large")


async def discard(scope: Scope, receive: Receive) -> None:
    """Read on, for a while. A client that still sends when its connection is closed never sees the answer."""
    headers = dict(scope["headers"])
    if b"expect" in headers:  # it waits for a word before it sends
        return
    left = _DISCARDED
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
    except TimeoutError:
        return  # it gets the answer now
