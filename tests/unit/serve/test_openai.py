"""The client that OpenAI publishes, with this server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def openai(require: Callable[[str], None]) -> Any:
    require("openai")
    import openai

    return openai


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Any]:
    with serving(key="correct-horse") as client:
        yield client


@pytest.fixture(scope="module")
def client(openai: Any, server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="correct-horse", max_retries=0) as found:
        yield found


USER: list[Any] = [{"role": "user", "content": "Hello"}]


def test_chats(client: Any, server: Any) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=6, logprobs=True, top_logprobs=2
    )
    (choice,) = found.choices
    assert choice.message.content == server.model.chat("Hello", max_tokens=6)
    assert choice.finish_reason == "length" and found.usage.completion_tokens == 6
    assert len(choice.logprobs.content) == 6 and len(choice.logprobs.content[0].top_logprobs) == 2
    talk = [*USER, choice.message, {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model="tiny", messages=talk, max_completion_tokens=4)
    plain = [
        *USER,
        {"role": "assistant", "content": choice.message.content},
        {"role": "user", "content": "And?"},
    ]
    assert again.choices[0].message.content == server.model.chat(plain, max_tokens=4)


def test_streams(client: Any, server: Any) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 15}
    stream = client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}, **how
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == server.model.chat("Hello", **how) and chunks[-1].usage.total_tokens > 15
    with client.chat.completions.create(model="tiny", messages=USER, stream=True) as left:
        next(iter(left))
    done = client.completions.create(model="tiny", prompt="One", stream=True, max_tokens=5)
    assert "".join(chunk.choices[0].text for chunk in done) == server.model.generate("One", max_tokens=5)


def test_the_helper_for_streams(client: Any, server: Any) -> None:
    whole = server.model.chat("Hello", max_tokens=9)
    with client.chat.completions.stream(model="tiny", messages=USER, stop=whole[5:7]) as stream:
        kinds = [event.type for event in stream]
        assert "content.delta" in kinds and kinds[-1] == "content.done"
        said = stream.get_final_completion().choices[0].message.content
    assert said == whole[: whole.index(whole[5:7])]


def test_embeddings_and_models(client: Any, server: Any) -> None:
    found = client.embeddings.create(model="tiny", input=["One way", "or"])  # in base64, which it unpacks
    for data, text in zip(found.data, ("One way", "or"), strict=True):
        np.testing.assert_allclose(data.embedding, server.model.embed(text), atol=1e-6)
    as_numbers = client.embeddings.create(model="tiny", input="or", encoding_format="float")
    np.testing.assert_allclose(as_numbers.data[0].embedding, found.data[1].embedding, rtol=1e-6)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "rlx"


def test_schemas(client: Any) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        old: bool

    found = client.chat.completions.parse(model="tiny", messages=USER, response_format=Person)
    person = found.choices[0].message.parsed
    assert isinstance(person, Person) and len(person.name) <= 5
    form: Any = {"type": "json_object"}
    plain = client.chat.completions.create(model="tiny", messages=USER, response_format=form, max_tokens=9)
    assert plain.choices[0].message.content.startswith("{")


def test_errors(openai: Any, client: Any, server: Any) -> None:
    def create(**fields: Any) -> None:
        client.chat.completions.create(**{"model": "tiny", "messages": USER, "max_tokens": 1, **fields})

    with pytest.raises(openai.BadRequestError, match="unknown or unsupported field 'logit_bias'") as caught:
        create(logit_bias={"5": 1})
    assert caught.value.param == "logit_bias" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as long:
        create(messages=[{"role": "user", "content": "x" * 999}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        create(messages=[{"role": "user", "content": "x" * (5 << 20)}])
    assert large.value.status_code == 413


def test_a_full_queue_is_tried_again(openai: Any, serving: Any) -> None:
    from served import held, wait_for

    with serving(slots=1, queue=1) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with held(server.engine):
            waits = server.open_stream()
            wait_for(lambda: server.engine.stats()["waiting"] == 1)
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="tiny", messages=USER)
            waits.close()


def test_what_a_client_gives_up_is_cancelled(openai: Any, server: Any) -> None:
    from served import held, wait_for

    async def give_up() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="correct-horse") as client:
            asked = client.chat.completions.create(model="tiny", messages=USER)
            task = asyncio.ensure_future(asked)
            while not server.engine.stats()["waiting"]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    wait_for(lambda: server.engine.stats()["running"] == 0)
    before = server.engine.stats()["cancelled"]
    with held(server.engine):
        asyncio.run(give_up())
    wait_for(lambda: server.engine.stats()["cancelled"] == before + 1)


def test_errors_after_a_stream_has_begun(openai: Any, serving: Any) -> None:
    from served import held

    with serving(slots=1, timeout=0.5) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with held(server.engine):
            stream = client.chat.completions.create(model="tiny", messages=USER, stream=True)
            with pytest.raises(openai.APIError, match="--timeout") as slow:
                list(stream)
            assert slow.value.code == "timeout"
            with pytest.raises(openai.InternalServerError, match="--timeout"):
                client.chat.completions.create(model="tiny", messages=USER)


def test_many_at_once(openai: Any, server: Any) -> None:
    want = [server.model.chat(f"Number {i}", max_tokens=8) for i in range(12)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="correct-horse") as client:
            asked = [
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": f"Number {i}"}], max_tokens=8
                )
                for i in range(12)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == want
