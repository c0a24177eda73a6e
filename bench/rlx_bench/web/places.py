"""Where exported models run: a process of Node, and workers of a page in a headless Chromium."""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlx_bench.harness import EngineError

HERE = Path(__file__).parent
PATIENCE = 600.0  # seconds; it only ends a hang
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",  # every first result loads everything
}
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


class Node:
    """A process of Node with one model."""

    def __init__(self, node: str) -> None:
        pipe = subprocess.PIPE
        command = [node, str(HERE / "node.mjs")]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"Node ended: {self.process.stderr.read()[-500:]}")
        return checked(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise EngineError(answer["error"])
    return answer


class _Handler(SimpleHTTPRequestHandler):
    """Files of the folders that were given, commands for the page, and its answers."""

    protocol_version = "HTTP/1.1"
    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *given: Any, chromium: Chromium) -> None:
        self.chromium = chromium
        super().__init__(*given)

    def translate_path(self, path: str) -> str:
        first, _, rest = path.partition("?")[0].lstrip("/").partition("/")
        for name, folder in self.chromium.folders.items():
            if first == name:
                found = (folder / rest).resolve()
                return str(found if found.is_relative_to(folder.resolve()) else HERE / "none")
        return str(HERE / Path(first).name)

    def do_GET(self) -> None:
        if self.path == "/next":
            self._send(json.dumps(self.chromium.commands.get()).encode())
        else:
            super().do_GET()

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(b"{}")
        self.chromium.answers.put(told)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: connections break when the browser ends."""


class Chromium:
    """A browser with one page, whose workers hold an engine each; `folders` are served by their names."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def ask(self, worker: str, do: str, **command: Any) -> dict[str, Any]:
        self.commands.put({"worker": worker, "do": do, **command})
        return checked(self.answers.get(timeout=PATIENCE))


class Tab:
    """One worker of the page, as the harness asks it."""

    def __init__(self, chromium: Chromium, name: str) -> None:
        self.chromium, self.name = chromium, name

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        return self.chromium.ask(self.name, do, **command)

    def close(self) -> None:
        self.ask("end")


@contextmanager
def chromium(folders: dict[str, Path]) -> Iterator[Chromium]:
    """A headless Chromium on its page."""
    found = Chromium(folders)
    binary = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    handler = functools.partial(_Handler, chromium=found)
    with tempfile.TemporaryDirectory() as profile, _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/page.html"
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", url],
            stdout=quiet,
            stderr=quiet,
            env={**os.environ, "no_proxy": "127.0.0.1"},
            start_new_session=True,
        )
        try:
            yield found
        finally:
            os.killpg(process.pid, 15)
            process.wait()
            server.shutdown()
