"""A headless Chromium that tests click through: WebDriver's protocol over HTTP, and nothing else."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the protocol has for elements
_PATIENCE = 900.0  # seconds; it only ends a hang
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=880,900",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


class Failed(Exception):
    """The browser refused a command."""


class Browser:
    """One window."""

    def __init__(self, server: str, profile: Path, more: tuple[str, ...] = ()) -> None:
        options = {
            "args": [*_FLAGS, f"--user-data-dir={profile}", *more],
            "binary": shutil.which("chromium"),
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.server = server
        self.session = self._send("POST", "/session", capabilities={"alwaysMatch": wanted})["sessionId"]

    def _send(self, method: str, path: str, **given: object):  # type: ignore[no-untyped-def]
        body = json.dumps(given).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server + path, body, headers, method=method)
        try:
            with _DIRECT.open(request, timeout=_PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise Failed(json.load(error)["value"]["message"]) from None

    def _ask(self, method: str, path: str, **given: object):  # type: ignore[no-untyped-def]
        return self._send(method, f"/session/{self.session}{path}", **given)

    def open(self, url: str) -> None:
        self._ask("POST", "/url", url=url)

    def run(self, script: str, *given: object):  # type: ignore[no-untyped-def]
        """What a script returns; it runs in the page, with `arguments`."""
        return self._ask("POST", "/execute/sync", script=script, args=list(given))

    def find(self, selector: str) -> str:
        return str(self._ask("POST", "/element", using="css selector", value=selector)[_ELEMENT])

    def click(self, selector: str) -> None:
        """Click once the element can be clicked: a page turns its buttons off while it works."""
        self.until(f"!document.querySelector({json.dumps(selector)})?.disabled")
        self._ask("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Type a text, or choose a file by its path."""
        self._ask("POST", f"/element/{self.find(selector)}/value", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self._ask("POST", f"/element/{self.find(selector)}/clear")
        self.type(selector, text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        self.click(f"{selector} option[value={json.dumps(value)}]")

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.run(
                "return Array.from(document.querySelectorAll(arguments[0]), e => e.textContent)", selector
            )
        )

    def wait(self, selector: str, pattern: str) -> str:
        """The text of an element, once it matches; an error that the page shows ends the wait."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            text = self.text(selector)
            if re.search(pattern, text):
                return text
            shown = self.text("#error:not([hidden])")
            if shown and selector != "#error":
                raise Failed(f"the page says: {shown}")
            time.sleep(0.05)
        raise Failed(f"{selector} shows {self.text(selector)!r}, which does not match {pattern!r}")

    def until(self, condition: str) -> None:
        """Wait until an expression of the page is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(f"return {condition}"):
            if time.monotonic() > end:
                raise Failed(f"{condition} does not become true")
            time.sleep(0.05)

    def logged(self) -> list[str]:
        """What the console has, with errors of the network and of policies."""
        return [f"{one['level']}: {one['message']}" for one in self._ask("POST", "/se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def browsing(profile: Path, *flags: str) -> Iterator[Browser]:
    """A browser, and the driver that leads it."""
    command = ["chromedriver", "--port=0"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    try:
        port = next(
            found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        browser = Browser(f"http://127.0.0.1:{port}", profile, flags)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of an exported page, from the server that was written next to it."""
    command = [sys.executable, str(folder / "serve.py"), "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[0]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
