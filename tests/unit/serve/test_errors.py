"""Requests that are refused: each with its status, and the field that is wrong by name."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from served import held, wait_for

from rlx.serve.body import MOST_BODY

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [USER], **fields}


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{**USER, **fields}]}


def with_schema(schema: object, **fields: object) -> dict[str, object]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat(response_format=form, **fields)


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(depth):
        found = {"items": found}
    return found


TOO_WIDE = {
    "anyOf": [
        {"type": "object", "properties": {f"p{i}{j}": {"type": "string"} for j in range(20)}}
        for i in range(200)
    ]
}
WIDE_AT_THE_END = {"type": "array", "prefixItems": [{"const": "ab"}, TOO_WIDE], "minItems": 2}
WRONG_FIELDS: list[tuple[str, dict[str, object], str, str]] = [
    # path, body, field, part of the message
    (CHAT, {}, "messages", "it must be a list of objects"),
    (CHAT, {"messages": []}, "messages", "a list with a message or more"),
    (CHAT, {"messages": "Hi"}, "messages", "'Hi'; it must be a list"),
    (CHAT, {"messages": ["Hi"]}, "messages", "a list of objects"),
    (CHAT, message(role="tool"), "messages[0].role", "'system' or 'developer' or 'user'"),
    (CHAT, message(role=None), "messages[0].role", "'system'"),
    (CHAT, message(role=["user"]), "messages[0].role", "'system'"),
    (CHAT, message(content=None), "messages[0].content", "a text"),
    (CHAT, message(content=7), "messages[0].content", "a text"),
    (CHAT, message(content="a\ud800"), "messages[0].content", "half a surrogate pair"),
    (CHAT, message(content=[{"type": "image_url"}]), "messages[0].content[0].type", "reads nothing else"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text", "a text"),
    (CHAT, message(tool_calls=[]), "messages[0].tool_calls", "unknown or unsupported field"),
    (CHAT, message(refusal="no"), "messages[0].refusal", "null"),
    (CHAT, chat(temperature=2.5), "temperature", "2.5; it must be a number from 0 to 2"),
    (CHAT, chat(temperature=True), "temperature", "True"),
    (CHAT, chat(top_p=-1), "top_p", "from 0 to 1"),
    (CHAT, chat(top_p="1"), "top_p", "'1'"),
    (CHAT, chat(seed=1.5), "seed", "a whole number"),
    (CHAT, chat(seed=10**30), "seed", "a whole number"),
    (CHAT, chat(max_tokens=0), "max_tokens", "from 1"),
    (CHAT, chat(max_completion_tokens="9"), "max_completion_tokens", "a whole number"),
    (CHAT, chat(n=2), "n", "n is 2; it must be 1"),
    (CHAT, chat(stop=[1]), "stop", "a text or a list of at most 16 texts"),
    (CHAT, chat(stop=["a"] * 17), "stop", "at most 16"),
    (CHAT, chat(stream="yes"), "stream", "true or false"),
    (CHAT, chat(stream_options={}), "stream_options", "needs stream = true"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), "stream_options.x", "unknown"),
    (CHAT, chat(logprobs=3), "logprobs", "true or false"),
    (CHAT, chat(top_logprobs=3), "top_logprobs", "needs logprobs = true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
    (CHAT, chat(response_format="json"), "response_format", "an object"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "'json_object'"),
    (CHAT, chat(response_format={}), "response_format.type", "'json_object'"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema", "an object like"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
        "a JSON schema",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}),
        "response_format",
        "the JSON schema cannot be used with this model",
    ),
    (CHAT, with_schema({"const": "\ud800"}), "response_format", "cannot be used with this model"),
    (CHAT, with_schema(nested(300)), "response_format", "recursion limit"),
    (CHAT, with_schema({"$ref": "#"}), "response_format", "cannot be used with this model"),
    (CHAT, with_schema(TOO_WIDE), "response_format", "cannot be used with this model"),
    (CHAT, with_schema({"$ref": "#"}, stream=True), "response_format", "cannot be used with this model"),
    (CHAT, with_schema(WIDE_AT_THE_END), "response_format", "cannot be used with this model"),
    (CHAT, chat(stop="x" * 1001), "stop", "at most 1000 characters"),
    (CHAT, chat(model=3), "model", "a text"),
    (CHAT, chat(user=3), "user", "a text"),
    (CHAT, chat(tools=[]), "tools", "unknown or unsupported field 'tools'"),
    (CHAT, chat(frequency_penalty=0), "frequency_penalty", "unknown or unsupported"),
    (CHAT, chat(**{"x" * 999: 1}), "x" * 60 + "...", "unknown or unsupported"),
    ("/v1/completions", {}, "prompt", "a text, a list of tokens"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "prompt", "one by one"),
    ("/v1/completions", {"prompt": ""}, "prompt", "no tokens"),
    ("/v1/completions", {"prompt": [1, 96]}, "prompt", "tokens from 0 to 95, not 96"),
    ("/v1/completions", {"prompt": [1, -1]}, "prompt", "not -1"),
    ("/v1/completions", {"prompt": [True]}, "prompt", "a list of tokens"),
    ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs", "a whole number"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "echo", "unknown"),
    ("/v1/completions", {"prompt": "a", "messages": []}, "messages", "unknown"),
    ("/v1/embeddings", {}, "input", "a text, a list of tokens"),
    ("/v1/embeddings", {"input": []}, "input", "a list of tokens"),
    ("/v1/embeddings", {"input": [["a"]]}, "input", "a list of tokens"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2048 are the most"),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions", "unknown"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
]


@pytest.mark.parametrize(("path", "body", "field", "words"), WRONG_FIELDS)
def test_a_wrong_field_is_named(
    client: Any, path: str, body: dict[str, object], field: str, words: str
) -> None:
    answer = client.post(path, body)
    assert answer.status == 400, answer
    assert answer.error["param"] == field and answer.error["type"] == "invalid_request_error"
    assert words in answer.error["message"], answer.error


def test_a_schema_that_fails_in_the_middle_of_a_stream(client: Any) -> None:
    answer = client.post(CHAT, with_schema(WIDE_AT_THE_END, stream=True))
    assert answer.status == 200
    *said, last = (part for part in answer.body.decode().split("\n\n") if part)
    assert said and "[DONE]" not in last
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "response_format"
    assert client.engine.stats()["running"] == 0


def test_user_and_null_change_nothing(client: Any) -> None:
    fields = dict.fromkeys(
        ("temperature", "seed", "stop", "n", "stream", "response_format", "logprobs", "model")
    )
    assert client.chat(max_tokens=3, user="me", **fields | {"n": 1}).text == client.chat(max_tokens=3).text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"n": NaN}', "NaN is not a number of JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b'{"messages": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001, "not valid JSON"),
    ],
)
def test_bodies_that_are_not_json(client: Any, body: bytes, words: str) -> None:
    answer = client.send("POST", CHAT, body, Content_Type="application/json")
    assert answer.status == 400 and words in answer.error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types(client: Any, kind: str) -> None:
    answer = client.send("POST", CHAT, json.dumps(chat()).encode(), Content_Type=kind)
    assert answer.status == 415 and "must be application/json" in answer.error["message"]


def test_bodies_that_are_too_large(client: Any) -> None:
    body = b" " * (MOST_BODY + 1)
    assert client.send("POST", CHAT, body, Content_Type="application/json").status == 413

    def parts() -> Iterator[bytes]:
        for _ in range(MOST_BODY // 65536 + 2):
            yield b" " * 65536

    answer = client.send("POST", CHAT, parts(), Content_Type="application/json")
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {1 << 40}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(client.address, timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_prompts_that_are_too_long(client: Any) -> None:
    for path, body in (
        (CHAT, chat() | message(content="a" * 600)),
        (CHAT, message(content="a" * 100_000)),
        ("/v1/completions", {"prompt": "a" * 512}),
        ("/v1/completions", {"prompt": [5] * 512}),
    ):
        answer = client.post(path, body)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert "room for 512 tokens" in answer.error["message"]
    assert client.post("/v1/completions", {"prompt": "a" * 511}).json["usage"]["completion_tokens"] == 1


def test_paths_and_methods(client: Any) -> None:
    assert client.get("/v1/nothing").status == 404 == client.get("/v1/models/").status
    assert client.get("/v1/nothing").error["message"] == "GET /v1/nothing: Not Found"
    answer = client.get(CHAT)
    assert answer.status == 405 and answer.headers["Allow"] == "POST" and answer.error["param"] is None
    assert client.post("/health", {}).status == 405


def test_refusals_wait_for_no_more_than_the_body(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.serve.body._DISCARD_SECONDS", 1e6)
    assert client.chat(model="gpt-4o").status == 404
    assert client.send("GET", "/nothing", b"x" * 1000).status == 404
    assert client.get("/nothing").status == 404


def test_another_model(client: Any) -> None:
    answer = client.chat(model="gpt-4o")
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert answer.error["message"] == "the model 'gpt-4o' is not here; 'tiny' is"
    assert client.get("/v1/models/gpt-4o").error["code"] == "model_not_found"
    assert client.chat(model="tiny", max_tokens=1).status == 200


def test_keys(serving: Any) -> None:
    with serving(key="correct horse") as client:
        for given in (
            "Bearer wrong",
            "Bearer ",
            "",
            "Basic correct horse",
            "Bearer correct horsf",
            "Bearer \xe9",
        ):
            answer = client.send("POST", CHAT, b"{}", Authorization=given)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/metrics", Authorization=given).status == 401
            for path in ("/health", "/", "/page.js", "/page.css"):
                assert client.get(path, Authorization=given).status == 200
        assert client.chat(max_tokens=1).status == 200
        assert client.get("/v1/models", Authorization="bearer correct horse").status == 200
        large = client.send("POST", CHAT, b" " * (MOST_BODY * 2), Authorization="Bearer wrong")
        assert large.status == 401


def test_names_of_other_sites_do_not_lead_here(client: Any, serving: Any) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"):
        answer = client.get("/v1/models", Host=host)
        assert answer.status == 403 and "--api-key-file" in answer.error["message"]
    for host in ("localhost", "LOCALHOST:8000", "chat.localhost", "[::1]:80", "192.168.1.2"):
        assert client.get("/v1/models", Host=host).status == 200
    with serving(key="correct horse") as other:
        assert other.get("/v1/models", Host="behind.a.proxy").status == 200


def test_a_full_queue(serving: Any) -> None:
    with serving(slots=1, queue=1) as client, held(client.engine):
        waits = client.open_stream()
        wait_for(lambda: client.engine.stats()["waiting"] == 1)
        answer = client.chat()
        assert answer.status == 429 and answer.error["code"] == "queue_full"
        assert answer.error["type"] == "rate_limit_error" and int(answer.headers["Retry-After"]) >= 1
        assert client.chat(stream=True).status == 429, "before the stream begins"
        waits.close()
        wait_for(lambda: "rlx_cancelled_total 1" in client.get("/metrics").body.decode())


def test_an_answer_that_takes_too_long(serving: Any) -> None:
    with serving(slots=1, timeout=0.5) as client:
        with held(client.engine):
            answer = client.chat()
            assert answer.status == 504 and answer.error["code"] == "timeout"
            assert answer.error["type"] == "server_error"
            answer = client.chat(stream=True)
            assert answer.status == 200 and answer.body.endswith(b"\n\n") and b"[DONE]" not in answer.body
            last = json.loads(answer.body.decode().split("\n\n")[-2].removeprefix("data: "))
            assert last["error"]["code"] == "timeout"
        wait_for(lambda: not client.engine.stats()["waiting"])
        assert client.chat(max_tokens=1).status == 200


def test_a_body_that_never_ends(serving: Any) -> None:
    with serving(timeout=0.3) as client, client.open_stream(cut=5) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_failing_engine(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr("rlx.serve.endpoints.read_chat", fails)
        answer = client.chat()
        assert answer.status == 500 and "secret" not in answer.error["message"]
    assert "secret" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("rlx.llm.sample.Sampler.choose", fails)
        answer = client.chat()
        assert (
            answer.status == 500 and answer.error["message"] == "the engine failed; the server's log says why"
        )
    assert client.chat(max_tokens=1).status == 200
