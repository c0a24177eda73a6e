"""Chat in the browser: tokens are those of Python, and so are greedy answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import rlx
from chromium import Browser, served
from in_node import WEB, in_node, texts
from rlx.cli.main import main
from rlx.llm import LanguageModel
from rlx.llm.chat_page import tokenizer_data
from rlx.llm.tokens import _SPLITS, LevelRules, Tokenizer, _byte_letters, _level_encoder, level_piece

ENCODE = """
import fs from "node:fs";
import { LevelTokenizer } from "./bpe.mjs";
const given = JSON.parse(fs.readFileSync("given.json", "utf-8"));
const tokenizer = new LevelTokenizer(JSON.parse(fs.readFileSync("tokenizer.json", "utf-8")));
console.log(JSON.stringify(given.map((text) => {
  const tokens = tokenizer.encode(text), decode = tokenizer.decoder();
  return [tokens, [...tokens.map((token) => decode(token)), decode()].join("")];
})));
"""
CONTEXT = 512
TOKENS = 6


def check(tokenizer: Tokenizer, given: list[str], folder: Path) -> None:
    (folder / "bpe.mjs").write_bytes((WEB / "bpe.mjs").read_bytes())
    (folder / "given.json").write_text(json.dumps(given))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_data(tokenizer)))
    found = in_node(folder, ENCODE)
    want = [tokenizer.encode(text, control=True) for text in given]
    wrong = [(text, f, w) for text, f, w in zip(given, found, want, strict=True) if f[0] != w]
    assert not wrong, (len(wrong), wrong[:2])
    assert [text for _, text in found] == [tokenizer.decode(tokens) for tokens in want]


@pytest.fixture(scope="module")
def model(require, zoo_path: Callable[..., Path]) -> LanguageModel:  # type: ignore[no-untyped-def]
    require("node")
    return rlx.llm.load(zoo_path("smollm2"), context=CONTEXT)


def test_tokens_of_a_trained_model(model: LanguageModel, tmp_path: Path) -> None:
    given = [*texts(1000), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "x" * 500, ""]
    check(model.tokenizer, given, tmp_path)


@pytest.mark.parametrize("name", _SPLITS)
def test_all_ways_to_cut_text(require, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    """With a few merges across letters, blanks and endings."""
    require("node")
    merges = [
        "' s",
        "' S",
        "\u0120 a",
        "a b",
        "e r",
        "er s",
        "1 2",
        "12 3",
        "\u010a \u010a",
        "\u0120 \u0120",
        "0 1",
    ]
    tokens = [*_byte_letters(), *(merge.replace(" ", "") for merge in merges), "<end>", "<user>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    rules = LevelRules(_SPLITS[name], merges, name == "llama-bpe")
    end, user = len(tokens) - 2, len(tokens) - 1
    plain = _level_encoder("x.gguf", rules, tokens)
    named = {"<end>": end}, {"<user>": user}
    tokenizer = Tokenizer(tokens, kinds, plain, level_piece, 65, frozenset({end}), *named, rules)
    words = (
        "it's IT'S we'LL 'ſ I'm  a  ab\n\n bers 0123 12345 \t x\u0085y \ufeff\u3000<end><user>A (a)..\r\n/ Ǆǅ"
    )
    check(tokenizer, [words, *words.split(" "), *texts(300)], tmp_path)


@pytest.fixture(scope="module")
def folder(require, model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    require("browser")
    there = tmp_path_factory.mktemp("chat")
    arguments = ["--wasm", str(there), "--page", "--context", str(CONTEXT), "--bind", "new=1..16"]
    assert main(["export", "zoo:smollm2", *arguments]) == 0
    return there


@pytest.mark.parametrize("threads", [1, 2])
def test_greedy_answers_are_those_of_python(
    browser: Browser, model: LanguageModel, folder: Path, threads: int
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are terse."}]
    with served(folder) as url:
        browser.open(f"{url}?threads={threads}")
        browser.wait("#status", f"^Ready, with {threads} thread")
        browser.type("#system", "You are terse.")
        browser.fill("#most", str(TOKENS))
        for turn, text in enumerate(("Why is the sky blue?", "<b>And</b> at night? 🙂"), 1):
            browser.run("document.getElementById('message').value = arguments[0]", text)  # drivers lack signs
            browser.click("#send")
            browser.wait(f".turn:nth-of-type({2 * turn})[data-done]", ".")
            shown = browser.run("return Array.from(document.querySelectorAll('.turn'), e => e.textContent)")
            tokens = browser.run(
                "return document.querySelector('.turn:last-child').dataset.tokens.split(' ')"
            )
            messages.append({"role": "user", "content": text})
            want = list(model.stream_tokens(model.prompt(messages), TOKENS))
            assert list(map(int, tokens)) == want
            assert shown[-2:] == [text, model.tokenizer.decode(want)]
            messages.append({"role": "assistant", "content": shown[-1]})
        assert browser.wait("#speed", "token").startswith(f"{TOKENS} tokens, ")


def test_an_answer_can_be_stopped_and_a_full_context_is_explained(browser: Browser, folder: Path) -> None:
    with served(folder) as url:
        browser.open(url)
        browser.wait("#status", "^Ready")
        browser.type("#message", "Count to one hundred.")
        browser.click("#send")
        browser.wait("#speed", r"^\d+ token")
        browser.click("#stop")
        browser.until("!document.querySelector('#send').disabled")
        browser.click("#reset")
        assert browser.texts(".turn") == []
        browser.run("document.getElementById('message').value = 'word '.repeat(600)")
        browser.click("#send")
        assert "the context has room for 512; begin a new chat" in browser.wait("#error", "tokens")
