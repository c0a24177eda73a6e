"""Semantic search in the browser: tokens are those of the model, and results have the order of Python's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chromium import Browser, served
from in_node import WEB, in_node, texts
from rlx.cli.demo import QUERIES, SENTENCES, Encoder, search
from rlx.cli.main import main

ENCODE = """
import fs from "node:fs";
import { WordPiece } from "./wordpiece.mjs";
const given = JSON.parse(fs.readFileSync("given.json", "utf-8"));
const tokenizer = new WordPiece(JSON.parse(fs.readFileSync("tokenizer.json", "utf-8")));
console.log(JSON.stringify(given.map((text) => tokenizer.encode(text, 64))));
"""
EACH_LETTER = """
import { normalised, words } from "./wordpiece.mjs";
const bert = { clean_text: true, handle_chinese_chars: true, strip_accents: null, lowercase: true };
const all = Array.from({ length: 0x110000 }, (_, i) => String.fromCodePoint(i));
const letters = all.filter((s) => s.isWellFormed());
console.log(JSON.stringify(letters.map((s) => [normalised(s, bert), words(`a${s}a`).length])));
"""


@pytest.fixture
def tokenizer(require, zoo_path: Callable[..., Path], tmp_path: Path):  # type: ignore[no-untyped-def]
    """That of the package; a copy of its file and the page's own are in a folder, where Node runs."""
    require("node")
    require("demo")
    from tokenizers import Tokenizer

    source = zoo_path("minilm", "tokenizer.json")
    for file in (source, WEB / "wordpiece.mjs"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    opened = Tokenizer.from_file(str(source))
    opened.no_padding()
    opened.enable_truncation(64)
    return opened


def test_tokens_are_those_of_the_package(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    given = texts()
    (tmp_path / "given.json").write_text(json.dumps(given))
    found = in_node(tmp_path, ENCODE)
    want = [encoding.ids for encoding in tokenizer.encode_batch(given)]
    wrong = [each for each in zip(given, found, want, strict=True) if each[1] != each[2]]
    assert not wrong, wrong[:3]


@pytest.mark.slow
def test_every_letter_there_is(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The tables in wordpiece.mjs are those of the package."""
    letters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    cleaned, parted = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    assert in_node(tmp_path, EACH_LETTER) == [[cleaned(c), len(parted(f"a{c}a"))] for c in letters]


@pytest.fixture(scope="module")
def folder(require, zoo_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    require("browser")
    require("demo")
    zoo_path("minilm")
    there = tmp_path_factory.mktemp("search")
    sizes = ["--bind", "batch=1", "--bind", "seq=1..256"]
    assert main(["export", "zoo:minilm", "--wasm", str(there), "--page", *sizes]) == 0
    return there


@pytest.mark.parametrize("threads", [1, 2])
def test_results_have_the_order_of_python(browser: Browser, folder: Path, threads: int) -> None:
    encoder = Encoder(lambda line: None)
    sentences = [*SENTENCES, "Ein Kätzchen schläft.", "<script>alert(1)</script>"]
    vectors = encoder(sentences)
    with served(folder) as url:
        browser.open(f"{url}?threads={threads}")
        browser.wait("#status", f"^Ready, with {threads} thread")
        browser.fill("#sentences", "\n".join(sentences))
        for query in QUERIES:
            browser.fill("#query", query)
            browser.click("#run")
            browser.wait("#time", "^Query")
            shown = browser.texts("#results .text")
            scores = dict(zip(sentences, vectors @ encoder([query])[0], strict=True))
            assert shown == sorted(sentences, key=lambda text: -scores[text])
            assert shown[:3] == [text for _, text in search(encoder, sentences, vectors, query)[0]]
            found = [float(score) for score in browser.texts("#results code")]
            np.testing.assert_allclose(found, [scores[text] for text in shown], atol=1e-3)
        browser.click("#examples button:nth-child(2)")
        browser.wait("#results li:first-child .text", "Neural")
