"""Completions, embeddings, models, health, metrics, and files of keys."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoders
from served import serving_model

from rlx.errors import ConfigError, FormatError
from rlx.serve.keys import read_keys


def test_completions(client: Any) -> None:
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 1.2, "seed": 4}
    want = client.model.generate("One way", **how)
    for prompt in ("One way", ["One way"], client.model.tokens("One way"), [client.model.tokens("One way")]):
        found = client.post("/v1/completions", {"prompt": prompt, **how}).json
        assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")
        (choice,) = found["choices"]
        assert choice == {"index": 0, "text": want, "logprobs": None, "finish_reason": "length"}
        assert found["usage"]["prompt_tokens"] == 7
    stream = client.post("/v1/completions", {"prompt": "One way", **how, "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in stream) == want
    assert [event["choices"][0]["finish_reason"] for event in stream][-2:] == [None, "length"]


def test_chances_in_completions(client: Any) -> None:
    body = {"prompt": "One way", "max_tokens": 5, "logprobs": 2}
    choice = client.post("/v1/completions", body).json["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] and found["text_offset"] == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(top) == 2 and max(top.values()) == top[token] == logprob
    stream = client.post("/v1/completions", {**body, "stream": True}).events
    parts = [event["choices"][0]["logprobs"] for event in stream if event["choices"][0]["logprobs"]]
    for name, values in found.items():
        assert [value for part in parts for value in part[name]] == values


def test_embeddings(client: Any) -> None:
    texts = ["One way", "or another"]
    want = [client.model.embed(text) for text in texts]
    found = client.post("/v1/embeddings", {"input": texts, "model": "tiny", "user": "me"}).json
    assert found["object"] == "list" and [data["index"] for data in found["data"]] == [0, 1]
    for data, vector in zip(found["data"], want, strict=True):
        np.testing.assert_allclose(data["embedding"], vector, atol=1e-6)
    assert found["usage"] == {"prompt_tokens": 17, "total_tokens": 17}
    for given in (texts[0], [client.model.tokens(texts[0])]):
        (data,) = client.post("/v1/embeddings", {"input": given, "encoding_format": "base64"}).json["data"]
        packed = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
        np.testing.assert_array_equal(packed, np.array(found["data"][0]["embedding"], np.float32))


def test_embeddings_of_an_encoder(tmp_path: Path) -> None:
    """One text alone, many at once: the same bits. Text is refused."""
    config = tiny_encoders.CONFIGS["bert"]
    folder = tiny_encoders.write_folder(tmp_path, config, tiny_encoders.random_weights(config))
    texts = ["hello world", "", "the a b c", "d e f " * 30]
    with serving_model(folder)() as client:
        want = client.model.embed(texts)
        found = client.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"}).json
        for data, vector in zip(found["data"], want, strict=True):
            assert base64.b64decode(data["embedding"]) == vector.astype("<f4").tobytes()
        assert found["usage"]["prompt_tokens"] == sum(len(client.model.tokens(text)) for text in texts)
        whole = client.post("/v1/embeddings", {"input": [[5] * 150]})
        assert whole.status == 200
        error = client.post("/v1/embeddings", {"input": [[5] * 151]}).error
        assert error["code"] == "context_length_exceeded"
        for answer in (client.chat("hello"), client.post("/v1/completions", {"prompt": "hello"})):
            assert answer.status == 400 and answer.error["code"] == "model_not_supported"
            assert "is an encoder: it serves /v1/embeddings" in answer.error["message"]


def test_models_and_health(client: Any) -> None:
    found = client.get("/v1/models").json
    assert found["object"] == "list" and [model["id"] for model in found["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json == found["data"][0]
    assert client.get("/health").json == {"status": "ok"}
    head = client.send("HEAD", "/health")
    assert head.status == 200 and head.body == b""


@pytest.mark.parametrize("kind", ["itself", "lookup"])
def test_drafts(kind: str, serving: Any, client: Any, folder: Path) -> None:
    """The same answers, and counters of what was proposed and taken."""
    how: dict[str, Any] = {"max_tokens": 60, "temperature": 0.5, "seed": 3}
    for text, fields in (("Hi hi hi hi hi", {}), ("Hello", how)):
        want = client.chat(text, **fields).text
        with serving(draft=folder if kind == "itself" else kind) as drafting:
            assert drafting.chat(text, **fields).text == want
            shown = drafting.get("/metrics").body.decode()
            found = {
                name: int(re.search(rf"^rlx_engine_draft_{name} (\d+)$", shown, re.MULTILINE)[1])
                for name in ("proposed", "accepted")
            }
            assert found["proposed"] >= found["accepted"] >= 0
            assert found["proposed"] > 0 or kind == "lookup"


def test_metrics(serving: Any) -> None:
    with serving() as client:
        client.chat("Hello", max_tokens=7)
        client.chat("Hello", max_tokens=3, stream=True)
        client.get("/v1/" + "x" * 50)
        answer = client.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.body.decode()
        prompt = len(client.model.prompt("Hello"))
        for line in (
            'rlx_requests_total{path="/v1/chat/completions",status="200"} 2',
            'rlx_requests_total{path="other",status="404"} 1',
            "rlx_generated_tokens_total 10",
            f"rlx_prompt_tokens_total {2 * prompt}",
            "rlx_first_token_seconds_count 2",
            'rlx_request_seconds_bucket{le="+Inf"} 3',
            "rlx_cancelled_total 0",
            "rlx_engine_running 0",
        ):
            assert f"\n{line}\n" in text, text
        for line in text.splitlines():
            assert re.fullmatch(
                r'# (HELP|TYPE) \w+ .*|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+.\deinf]+', line
            ), line


def test_the_page_and_its_headers(client: Any) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = client.get(path)
        assert answer.status == 200 and answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        assert "http" not in answer.body.decode().replace("https://", "http"), "nothing comes from elsewhere"
    script = client.get("/page.js").body.decode()
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script and "eval" not in script
    for path in ("/", "/health", "/v1/models", "/nothing"):
        assert client.get(path).headers["X-Content-Type-Options"] == "nosniff"
        assert client.get(path).headers["Access-Control-Allow-Origin"] is None


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_files_of_keys(tmp_path: Path) -> None:
    keys = read_keys(key_file(tmp_path / "keys", "# two of them\nfirst-key-1\n\n  second-key  \n"))
    assert keys.accept("first-key-1") and keys.accept("second-key")
    assert not any(
        keys.accept(key) for key in (None, "", "first-key", "first-key-12", "# two of them", "\udcff")
    )


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("long-enough", 0o640, "can be read by others; run: chmod 600"),
        ("long-enough", 0o604, "can be read by others"),
        ("long-enough", 0o620, "can be read by others"),
        ("", 0o600, "has no API key"),
        ("# none\n", 0o600, "has no API key"),
        ("short", 0o600, "key number 1 must have 8 characters or more"),
        ("long-enough\nwith a space", 0o600, "key number 2 must have"),
        ("x" * 70_000, 0o600, "more than 65536 bytes"),
        ("schlüssel-9", 0o600, "is not a valid file of API keys"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=message):
        read_keys(key_file(tmp_path / "keys", text, mode))


def test_what_is_not_a_file_of_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "missing", "."):
        with pytest.raises(FormatError, match="cannot read"):
            read_keys(tmp_path / name)
