"""The page of any model: sizes, values, outputs, errors; with and without threads."""

from __future__ import annotations

import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

import rlx
from chromium import Browser, served
from rlx import ops
from rlx.export import Page
from rlx.ir.graph import Graph
from rlx.runtime.program import CompiledProgram


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    g = Graph("sums")
    x = g.input("x", ("rows", 3), "f32")
    count = g.input("count", (2,), "i64")
    half = g.input("half", (2,), "f16")
    seen = g.state("seen", (), "f32", init=np.float32(0))
    g.set_state("seen", seen + 1.0)
    g.output("sums <b>", ops.sum(x, axis=1) + seen)
    g.output("twice", count * 2)
    g.output("halved", half / 2.0)
    return rlx.compile(g, threads=1)


@pytest.fixture(scope="module")
def folder(program: CompiledProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("page") / "sums"
    program.export(there, "wasm", bind={"rows": (1, 9)}, page=Page(title="Sums & <i>more</i>"))
    return there


def numbers(browser: Browser, output: str) -> list[float]:
    text = browser.text(f"[data-output='{output}'] .values")
    return [float(number) for number in text.split(",")]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_runs(browser: Browser, folder: Path, threads: int) -> None:
    with served(folder) as url:
        browser.open(f"{url}?threads={threads}")
        browser.wait("#status", f"^Ready, with {threads} thread")
        assert browser.text("h1") == "Sums & <i>more</i>"  # text, not elements
        browser.fill("input[name=rows]", "2")
        for name, typed in {
            "x": "1, 2, 3, [4 5 6]",
            "count": "-7 9007199254740993",
            "half": "0.1 65504",
        }.items():
            browser.choose(f"[data-input={name}] select", "typed")
            browser.fill(f"[data-input={name}] textarea", typed)
        browser.click("#run")
        browser.wait("#time", r"^\d+\.\d\d ms$")
        assert numbers(browser, "sums <b>") == [6, 15]
        assert numbers(browser, "twice") == [-14, 2 * 9007199254740992]  # as JavaScript reads such a number
        halved = (np.array([0.1, 65504], np.float16) / np.float16(2)).tolist()
        np.testing.assert_allclose(numbers(browser, "halved"), halved, rtol=1e-6)
        browser.click("#run")
        browser.wait("[data-output='sums <b>'] .values", "^7, 16$")  # the state has counted
        browser.click("#reset")
        browser.click("#run")
        browser.wait("[data-output='sums <b>'] .values", "^6, 15$")


def test_wrong_values_are_explained(browser: Browser, folder: Path) -> None:
    with served(folder) as url:
        browser.open(url)
        browser.wait("#status", "^Ready")
        browser.choose("[data-input=x] select", "typed")
        browser.fill("[data-input=x] textarea", "1, 2")
        browser.click("#run")
        assert browser.wait("#error", ".").startswith('input "x" has 2 elements, not ')
        browser.fill("[data-input=x] textarea", "1, <img src=x>")
        browser.click("#run")
        assert browser.wait("#error", "x: ") == 'x: "<img" is not a number'
        browser.choose("[data-input=x] select", "counting")
        browser.click("#run")
        browser.wait("#time", "ms")
        assert browser.text("#error") == ""


def test_a_page_without_weights_says_so(browser: Browser, program: CompiledProgram, tmp_path: Path) -> None:
    made = program.export(tmp_path, "wasm", page=True)
    weights = tmp_path / f"{made.name}.weights"
    weights.write_bytes(weights.read_bytes()[:-8])
    with served(tmp_path) as url:
        browser.open(url)
        assert browser.wait("#error", ".") == "the weights are truncated; copy the file again"
        assert browser.text("#status") == "The model cannot be used"


def test_the_server_serves_the_page_and_nothing_else(require, folder: Path) -> None:  # type: ignore[no-untyped-def]
    (folder / "secret.txt").write_text("not for others")

    def status(url: str, **headers: str) -> tuple[int, Message]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    with served(folder) as url:
        found, headers = status(url + "sums.wasm")
        assert found == 200 and headers["Content-Type"] == "application/wasm"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert "script-src 'self' 'wasm-unsafe-eval';" in headers["Content-Security-Policy"]
        assert status(url + "page.mjs")[1]["Content-Type"] == "text/javascript"
        assert status(url + "secret.txt")[0] == status(url + "../serve.py")[0] == 404
        assert status(url, Host="evil.example")[0] == 404
        assert url.startswith("http://127.0.0.1:")
