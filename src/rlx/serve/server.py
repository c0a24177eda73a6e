"""The server: its socket, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from rlx import progress
from rlx.errors import ConfigError
from rlx.llm.engine import Engine
from rlx.llm.sample import Sampling
from rlx.serve.app import App
from rlx.serve.connection import Connection
from rlx.serve.endpoints import Endpoints
from rlx.serve.keys import Keys
from rlx.serve.metrics import Metrics
from rlx.serve.requests import Served

_BACKLOG = 512
_MOST_CONNECTIONS = 1000
_UNREAD_SECONDS = 60  # a client that reads nothing for so long is cut off by the system
_GRACE_SECONDS = 5.0  # after the last answer must have ended


class Server:
    """Answers HTTP requests with a model, until a signal or `stop`.

    The socket is open when this returns, so `url` is known, also for port 0. SIGTERM and SIGINT let requests
    finish (which takes `timeout` seconds at most) and refuse new connections; a second signal stops at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        name: str | None = None,
        keys: Keys | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.name = name or name_of(engine)
        self.engine = engine
        self._socket, local = _listen(host, port)
        metrics = Metrics()
        served = Served(self.name, sampling or Sampling(), max_tokens)
        self._endpoints = Endpoints(engine, served, metrics, timeout)
        self._app = App(self._endpoints, metrics, keys or Keys([]), local)
        config = uvicorn.Config(
            self._app,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(timeout + _GRACE_SECONDS) + 1,
        )
        self._server = _Uvicorn(config, self._drain)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until the end. Then the engine is closed, too."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        try:
            await self._server.serve([self._socket])
        finally:
            self._endpoints.close()
            await asyncio.to_thread(self.engine.close, drain=False)

    def stop(self, at_once: bool = False) -> None:
        """Do what a signal does (with `at_once`, two of them); from any thread."""
        for _ in range(1 + at_once):
            self._server.leave()

    def _drain(self) -> None:
        self._app.draining = True
        progress.info("stopping when the requests that are here have been answered")


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which a second signal of any kind stops at once."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = loop = asyncio.get_running_loop()
        gets_signals = threading.current_thread() is threading.main_thread()
        signals = [signal.SIGINT, signal.SIGTERM] if gets_signals else []
        for number in signals:
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            self._loop = None
            for number in signals:
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """Once: answer what is here. Twice: stop."""
        if self.should_exit:
            self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cut_off)
        else:
            self.should_exit = True
            self._drain()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def name_of(engine: Engine) -> str:
    """What a model is called where nobody says: its file without the ending, or its folder."""
    path = engine.source.path
    return path.parent.name if path.name == "config.json" else path.stem


def _listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """A socket that listens, and whether only this machine can reach it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS)
            found.bind(address)
            found.listen(_BACKLOG)
        except BaseException:
            found.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why}; choose another --host or --port"
        ) from None
    return found, ipaddress.ip_address(address[0]).is_loopback
