"""/v1/chat/completions: answers are those of the model, whole and as streams."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_an_answer_is_that_of_the_model(client: Any) -> None:
    answer = client.chat("Hello", max_tokens=9)
    want = client.model.chat("Hello", max_tokens=9)
    found = answer.json
    assert answer.status == 200 and found["object"] == "chat.completion" and found["model"] == "tiny"
    assert found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": want, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = len(client.model.prompt("Hello"))
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 9)
    assert usage["total_tokens"] == prompt + 9
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < prompt


def test_sampling(client: Any) -> None:
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "top_p": 0.9, "seed": 5}
    assert client.chat("abc", **how).text == client.model.chat("abc", **how)
    assert len({client.chat("abc", **{**how, "seed": seed}).text for seed in range(5)}) > 1
    assert client.chat("abc", **{**how, "seed": -5}).text == client.chat("abc", **how).text
    whole = client.chat("abc", **how).text
    stopped = client.chat("abc", **how, stop=[whole[4:6], "zzz"])
    assert stopped.text == whole[: whole.index(whole[4:6])]
    assert stopped.json["choices"][0]["finish_reason"] == "stop"
    assert client.chat("abc", **how, stop=whole[4:6]).text == stopped.text
    longer = {**how, "max_tokens": None, "max_completion_tokens": 12}
    assert client.chat("abc", **longer).text == whole


def test_conversations_and_parts(client: Any) -> None:
    talk = [
        {"role": "developer", "content": "Be odd."},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "C", "refusal": None, "name": "me"},
        {"role": "user", "content": "D"},
    ]
    plain = [{"role": "system", "content": "Be odd."}, {"role": "user", "content": "Ab"}, *talk[2:]]
    answer = client.post("/v1/chat/completions", {"messages": talk, "model": "tiny", "max_tokens": 5})
    assert answer.text == client.model.chat(plain, max_tokens=5)


@pytest.mark.parametrize("usage", [True, False])
def test_streams(client: Any, usage: bool) -> None:
    how: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
    more = {"stream_options": {"include_usage": True}} if usage else {}
    events = client.chat("Hello", stream=True, **how, **more).events
    whole = client.chat("Hello", **how).json
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    if usage:
        last = events.pop()
        assert last["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole["usage"][name]
    first, *middle, end = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert end["delta"] == {} and end["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in (first, *middle))
    text = "".join(choice["delta"]["content"] for choice in middle)
    assert text == whole["choices"][0]["message"]["content"] and len(middle) > 5


def test_chances_of_tokens(client: Any) -> None:
    found = client.chat("Hello", max_tokens=5, logprobs=True, top_logprobs=3)
    content = found.json["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == found.text
    tokens = client.model.prompt("Hello")
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] < 0  # the best is taken
        tops = [top["logprob"] for top in token["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
    logits = client.model.logits(tokens)[-1].astype(float)
    top = logits.max()
    want = -math.log(sum(map(math.exp, logits - top)))
    assert abs(content[0]["logprob"] - want) < 1e-4
    events = client.chat("Hello", max_tokens=5, logprobs=True, stream=True).events
    chunks = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    streamed = [token for chunk in chunks for token in chunk["content"]]
    assert [token["logprob"] for token in streamed] == [token["logprob"] for token in content]
    assert all(token["top_logprobs"] == [] for token in streamed)


def test_answers_in_json(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    found = json.loads(client.chat("A person", response_format=form).text)
    assert found.keys() == {"name", "age"} and len(found["name"]) <= 6
    begun = client.chat(
        "x", response_format={"type": "json_object"}, max_tokens=4, temperature=1, seed=2
    ).text
    assert begun.startswith("{")
    assert client.chat("x", response_format={"type": "text"}, max_tokens=4).text


def test_the_servers_own_limits(serving: Any) -> None:
    from rlx.llm import Sampling

    with serving(max_tokens=4, sampling=Sampling(temperature=1.5, seed=9)) as client:
        want = client.model.chat("abc", max_tokens=4, temperature=1.5, seed=9)
        assert client.chat("abc").text == want
        assert client.chat("abc", max_tokens=50).text == want
        assert client.chat("abc", max_tokens=2).text == want[:2]
