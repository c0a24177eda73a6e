"""Serve the page in this folder to this machine only: python serve.py [PORT]

Threads need memory that workers share, which browsers allow only to pages with the isolation headers below.
Other web servers do as well, if they send them.
"""

from __future__ import annotations

import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "$policy",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".weights": "application/octet-stream",
}


class Handler(SimpleHTTPRequestHandler):
    """Files of the page, and nothing else of the folder."""

    protocol_version = "HTTP/1.1"
    extensions_map = TYPES

    def send_head(self):  # type: ignore[no-untyped-def]
        host, path = self.headers.get("Host", "").partition(":")[0], Path(self.translate_path(self.path))
        known = path.suffix in TYPES or path == Path(self.directory)
        if host not in ("127.0.0.1", "localhost") or not known:
            self.send_error(404)  # also where another name leads here: it is not this machine's own
            return None
        return super().send_head()

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Silent: the page shows what goes wrong."""


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    folder = str(Path(__file__).resolve().parent)
    with ThreadingHTTPServer(("127.0.0.1", port), lambda *given: Handler(*given, directory=folder)) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
