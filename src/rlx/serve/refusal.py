"""Requests that are not answered: a status, and a body in the shape of OpenAI's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

from rlx.errors import RlxError

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(RlxError):
    """Why a request is not answered; `param` is the field that is wrong.

    >>> Refusal(400, "n is 2; only 1 is possible", param="n").body()["error"]["param"]
    'n'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Json(self.body(), self.status, self.headers)


class Json(Response):
    """An answer in JSON; numbers that JSON does not have are an error."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json_bytes(value), status, headers)


def json_bytes(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
