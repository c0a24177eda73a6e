"""What tests do with a server: requests over HTTP, and an engine that they hold."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tiny_chat import write_chat_model

NAME = "tiny"
CONTEXT = 512
HANG = 600.0  # seconds that end a hang; a machine may be stopped for minutes


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: http.client.HTTPMessage

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["Content-Type"] == "application/json", self
        assert self.json["error"].keys() == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def text(self) -> str:
        assert self.status == 200, self
        return self.json["choices"][0]["message"]["content"]

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended as it should."""
        assert self.headers["Content-Type"] == "text/event-stream; charset=utf-8", self
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


class Client:
    """Sends requests, each on a connection of its own."""

    def __init__(
        self, url: str, key: str | None = None, server: Any = None, engine: Any = None, model: Any = None
    ) -> None:
        self.url, self.key, self.server, self.engine, self.model = url, key, server, engine, model
        address = urlsplit(url)
        self.address = (address.hostname or "", address.port or 0)

    def send(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, **headers: str
    ) -> Answer:
        head = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.key is not None:
            head.setdefault("Authorization", f"Bearer {self.key}")
        connection = http.client.HTTPConnection(*self.address, timeout=HANG)
        try:
            connection.request(method, path, body, head)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), answer.headers)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, value: object, **headers: str) -> Answer:
        headers = {"Content_Type": "application/json", **headers}
        return self.send("POST", path, json.dumps(value).encode(), **headers)

    def chat(self, text: str = "Hi", **fields: object) -> Answer:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def open_stream(self, cut: int = 0, buffer: int = 0, **fields: object) -> socket.socket:
        """A connection with a stream of which nothing was read; `cut` bytes of its body are not sent."""
        body = json.dumps(
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
        ).encode()
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"{key}Content-Length: {len(body)}\r\n\r\n"
        connection = socket.socket()
        connection.settimeout(HANG)
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(self.address)
        connection.sendall(head.encode() + body[: len(body) - cut])
        return connection


def write_served_model(folder: Path) -> Path:
    return write_chat_model(folder, max_position_embeddings=CONTEXT)


def serving_model(folder: Path) -> Callable[..., Any]:
    """`with serving(slots=2, timeout=3.0) as client`: a server of a model with these options."""
    import rlx

    model = rlx.llm.load(folder)

    @contextmanager
    def start(
        key: str | None = None,
        slots: int = 4,
        queue: int = 64,
        name: str = NAME,
        draft: Any = None,
        **options: Any,
    ) -> Iterator[Client]:
        keys = rlx.serve.Keys([] if key is None else [key])
        engine = rlx.llm.Engine(model, draft=draft, slots=slots, queue=queue)
        server = rlx.serve.Server(engine, port=0, name=name, keys=keys, **options)
        thread = threading.Thread(target=server.run, name="server")
        thread.start()
        try:
            yield Client(server.url, key, server=server, engine=engine, model=model)
        finally:
            server.stop(at_once=True)
            thread.join(HANG)
            assert not thread.is_alive(), "the server does not stop"

    return start


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Client, Any]]:
    """A server in a process of its own, once it listens."""
    command = [sys.executable, "-m", "rlx", "serve", str(folder), "--port", "0", "--json", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    try:
        assert process.stdout is not None
        lines = ""
        while not lines.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.communicate()
            lines += line
        about = json.loads(lines)
        yield process, Client(about["url"]), about
    finally:
        process.kill()
        process.communicate()


@contextmanager
def held(engine: Any) -> Iterator[None]:
    """The engine's thread waits inside: it has one request, and gets no further with it."""
    from rlx.llm import Request

    reached, goes_on = threading.Event(), threading.Event()

    def deliver(piece: object) -> None:
        reached.set()
        assert goes_on.wait(HANG)

    generation = engine.submit(Request((5, 6), 2), deliver)
    assert reached.wait(HANG)
    try:
        yield
    finally:
        goes_on.set()
        wait_for(lambda: generation.finish_reason is not None)


def wait_for(happened: Callable[[], bool], seconds: float = HANG) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
