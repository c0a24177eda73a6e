"""The ES module of an export in a browser, under a content security policy, with and without threads."""

from __future__ import annotations

import functools
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.graph import Graph

POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'"
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
SCRIPT = """
import { load } from "./net.mjs";
const found = { isolated: crossOriginIsolated, progress: 0 };
try {
  const onProgress = (loaded, total) => { found.progress = loaded / total; };
  const model = await load(undefined, { threads: 2, onProgress });
  found.threads = model.threads;
  const x = new Float32Array(6 * 16).map((_, i) => Math.sin(i));
  for (let i = 0; i < 5; i++) found.y = Array.from(model.run({ x }, { n: 6 }).y);
  try { new Function("return 1"); found.evaluates = true; } catch { found.evaluates = false; }
  model.close();
  const weights = new URL("net.weights", location);
  const soon = () => new Promise((done) => setTimeout(done, 50));
  for (let i = 0; i < 100 && !(await caches.match(weights)); i++) await soon();
  const again = await load(undefined, { threads: 1 });
  found.again = Array.from(again.run({ x }, { n: 6 }).y);
} catch (error) { found.error = String(error); }
await fetch("found", { method: "POST", body: JSON.stringify(found) });
"""
PAGE = "<!doctype html><script type=module src=page.mjs></script>"


class Handler(SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

    def __init__(
        self, *args: object, headers: dict[str, str], told: queue.Queue[str], **options: object
    ) -> None:
        self.more, self.told = headers, told
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def end_headers(self) -> None:
        for name, value in self.more.items():
            self.send_header(name, value)
        super().end_headers()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def do_POST(self) -> None:
        """What the page has found."""
        self.told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path, headers: dict[str, str]) -> Iterator[tuple[str, queue.Queue[str]]]:
    """The address of a page, and what it sends."""
    told: queue.Queue[str] = queue.Queue()
    handler = functools.partial(Handler, directory=str(folder), headers=headers, told=told)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/page.html", told
        server.shutdown()


@pytest.mark.parametrize("isolated", [True, False])
def test_a_page_runs_the_model(require, tmp_path: Path, isolated: bool) -> None:  # type: ignore[no-untyped-def]
    require("browser")
    g = Graph("net")
    w = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    g.output("y", ops.softmax(g.input("x", ("n", 16), "f32") @ g.param("w", (16, 16), "f32", value=w)))
    program = rlx.compile(g, threads=1)
    program.export(tmp_path, "wasm", bind={"n": (1, 8)})
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "page.mjs").write_text(SCRIPT)
    Handler.asked.clear()
    headers = {"Content-Security-Policy": POLICY, **(ISOLATED if isolated else {})}
    browser = shutil.which("chromium") or "chromium"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    with served(tmp_path, headers) as (url, told):
        command = [browser, *flags, "--remote-debugging-port=0", url]
        page = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = json.loads(told.get(timeout=90))
        finally:
            page.kill()
            page.wait()
    assert "error" not in found, found
    assert found["isolated"] is isolated and found["threads"] == (2 if isolated else 1)
    assert found["progress"] == 1 and found["evaluates"] is False
    x = np.sin(np.arange(6 * 16)).astype(np.float32).reshape(6, 16)
    for name in ("y", "again"):
        np.testing.assert_allclose(np.reshape(found[name], (6, 16)), program(x), rtol=2e-5, atol=2e-5)
    assert Handler.asked.count("/net.weights") == 1  # the second time they come from the cache
