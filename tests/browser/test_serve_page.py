"""The page that `rlx serve` shows: a conversation, its settings, the stop button; text stays text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import serving_model, wait_for, write_served_model

from chromium import Browser
from rlx.llm.sample import Sampler

HTML = "<b>HI</b><img src=x>"


@pytest.fixture(scope="module")
def serving(require: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    require("serve")
    require("browser")
    return serving_model(write_served_model(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def client(serving: Callable[..., Any]) -> Iterator[Any]:
    with serving() as found:
        yield found


def say(browser: Browser, text: str) -> None:
    browser.fill("#text", text)
    browser.click("#send")


def wait_until_said(browser: Browser) -> None:
    wait_for(lambda: browser.run("return document.getElementById('stop').disabled"))


def test_a_conversation(browser: Browser, client: Any) -> None:
    browser.open(client.url)
    browser.wait("#model", "^tiny$")
    browser.click("summary")
    browser.fill("#system", "Be odd.")
    browser.fill("#most", "7")
    browser.fill("#temperature", "0")
    talk = [{"role": "system", "content": "Be odd."}]
    for text in ("Hello", "And more?"):
        say(browser, text)
        browser.wait("#note", r"^7 tokens, \d+\.\d tokens/s, the first after \d+\.\d\d s$")
        wait_until_said(browser)
        talk.append({"role": "user", "content": text})
        talk.append({"role": "assistant", "content": client.model.chat(talk, max_tokens=7)})
        assert browser.texts("#talk > div") == [message["content"] for message in talk[1:]]
    browser.click("#reset")
    assert browser.texts("#talk > div") == []
    browser.type("#text", "Hello\ue007")  # the key Enter
    wait_for(lambda: len(browser.texts("#talk > div")) == 2)
    wait_until_said(browser)
    assert browser.texts("#talk > div") == ["Hello", talk[2]["content"]]


def test_the_stop_button(browser: Browser, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, choose, calls = threading.Event(), Sampler.choose, 0

    def chosen(self: Sampler, *given: Any) -> int:
        nonlocal calls
        calls += 1
        assert calls <= 5 or goes_on.wait(120)
        return choose(self, *given)

    browser.open(client.url)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", chosen)
        say(browser, "Hello")
        browser.wait("#talk > .assistant", "^.....$")
        assert browser.run("return document.getElementById('send').disabled") is True
        browser.click("#stop")
        browser.wait("#note", "^stopped$")
        wait_for(lambda: "rlx_cancelled_total 1" in client.get("/metrics").body.decode())
        goes_on.set()
        wait_for(lambda: client.engine.stats()["running"] == 0)
    assert len(browser.text("#talk > .assistant")) == 5
    say(browser, "Go on")
    wait_until_said(browser)
    assert len(browser.texts("#talk > .assistant")) == 2 and not browser.texts("#talk > .error")


def test_text_is_never_html(browser: Browser, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = client.model.tokenizer
    tokens = iter([*tokenizer.encode(HTML), min(tokenizer.ends)])
    browser.open(client.url)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", lambda *_: next(tokens))
        say(browser, HTML)
        wait_until_said(browser)
    assert browser.texts("#talk > div") == [HTML, HTML]
    assert browser.run("return document.querySelectorAll('#talk b, #talk img').length") == 0
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
    script += "document.body.append(s); return window.ran ?? null"
    assert browser.run(script) is None, "the policy lets no text become code"
    assert any("Content Security Policy" in line for line in browser.logged())


def test_keys_and_errors(browser: Browser, serving: Any) -> None:
    with serving(key="correct-horse", max_tokens=3) as client:
        browser.open(client.url)
        wait_for(lambda: browser.run("return document.getElementById('settings').open"))
        say(browser, "Hello")
        browser.wait("#talk > .error", "no valid API key")
        browser.fill("#key", "correct-horse\t")
        browser.wait("#model", "^tiny$")
        say(browser, "Hello")
        wait_until_said(browser)
        assert browser.text("#talk > .assistant") == client.model.chat("Hello", max_tokens=3)
        say(browser, "x" * 600)
        wait_until_said(browser)
        assert "room for 512 tokens" in browser.texts("#talk > .error")[-1]
        logged = browser.logged()
        assert logged and all("Failed to load resource" in line for line in logged)
