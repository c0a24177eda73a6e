"""What requests ask for: their fields, read into records.

A field that is not read here is refused by name. `user` is the only one that is accepted and ignored: it
names the person who asks, and no answer depends on it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

import numpy as np

from rlx.files import Json
from rlx.llm.sample import Sampling
from rlx.llm.text import Schema
from rlx.records import dataclass
from rlx.serve.fields import Fields
from rlx.serve.refusal import Refusal

SCHEMA = "response_format"
"""The field that has the schema of an answer."""
_MOST_STOPS = 16
_LONGEST_STOP = 1000  # characters
_MOST_TOP = 20  # tokens whose chances may be asked for
_MOST_INPUTS = 2048  # texts of one request for embeddings
_SEEDS = 1 << 63
Number = TypeVar("Number", int, float)
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Served:
    """The model that is served: its name, and what holds where a request says nothing."""

    name: str
    sampling: Sampling
    max_tokens: int | None
    """The longest answer that a request can get."""


@dataclass(frozen=True)
class Asked:
    """What requests for chats and for completions have in common."""

    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    schema: Schema | None
    logprobs: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with the counts of tokens."""


@dataclass(frozen=True)
class Chat:
    messages: list[Json]
    asked: Asked


@dataclass(frozen=True)
class Completion:
    prompt: str | list[int]
    asked: Asked


@dataclass(frozen=True)
class Embeddings:
    inputs: list[str | list[int]]
    base64: bool


def read_chat(body: Json, served: Served) -> Chat:
    """A request to /v1/chat/completions.

    >>> served = Served("m", Sampling(), None)
    >>> read_chat({"messages": [{"role": "user", "content": "Hi"}], "seed": 3}, served).asked.sampling.seed
    3
    """
    fields = Fields(body)
    _check_model(fields, served)
    messages = [_message(one) for one in fields.inners("messages")]
    if not messages:
        fields.wrong("messages", "a list with a message or more")
    logprobs = None
    top = fields.whole("top_logprobs", 0, _MOST_TOP)
    if fields.flag("logprobs"):
        logprobs = top or 0
    elif top is not None:
        raise Refusal(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    asked = _asked(fields, served, logprobs, _schema(fields.inner(SCHEMA)))
    fields.finish()
    return Chat(messages, asked)


def read_completion(body: Json, served: Served) -> Completion:
    """A request to /v1/completions: one prompt, as a text or as tokens."""
    fields = Fields(body)
    _check_model(fields, served)
    prompts = _inputs(fields, "prompt")
    if len(prompts) != 1:
        raise Refusal(400, f"prompt has {len(prompts)} texts; send them one by one", param="prompt")
    asked = _asked(fields, served, fields.whole("logprobs", 0, _MOST_TOP), None)
    fields.finish()
    return Completion(prompts[0], asked)


def read_embeddings(body: Json, served: Served) -> Embeddings:
    """A request to /v1/embeddings."""
    fields = Fields(body)
    _check_model(fields, served)
    inputs = _inputs(fields, "input")
    packed = fields.choice("encoding_format", ("float", "base64")) == "base64"
    fields.text("user")
    fields.finish()
    return Embeddings(inputs, packed)


def _check_model(fields: Fields, served: Served) -> None:
    """There is one model, so its name may be left out; another one is not there."""
    name = fields.text("model")
    if name is not None and name != served.name:
        raise Refusal(
            404,
            f"the model {name[:100]!r} is not here; {served.name!r} is",
            param="model",
            code="model_not_found",
        )


def _asked(fields: Fields, served: Served, logprobs: int | None, schema: Schema | None) -> Asked:
    fields.whole("n", 1, 1)
    fields.text("user")
    default = served.sampling
    sampling = replace(
        default,
        temperature=_or(fields.number("temperature", 0, 2), default.temperature),
        top_p=_or(fields.number("top_p", 0, 1), default.top_p),
        seed=abs(_or(fields.whole("seed", -_SEEDS, _SEEDS - 1), default.seed)),
    )
    lengths = [fields.whole(name, 1, 1 << 31) for name in ("max_tokens", "max_completion_tokens")]
    wanted = [length for length in (*lengths, served.max_tokens) if length is not None]
    stream, options, usage = fields.flag("stream"), fields.inner("stream_options"), False
    if options is not None:
        if not stream:
            raise Refusal(400, "stream_options needs stream = true", param="stream_options")
        usage = options.flag("include_usage")
        options.finish()
    stop = fields.texts("stop", _MOST_STOPS, _LONGEST_STOP)
    return Asked(min(wanted, default=None), sampling, stop, schema, logprobs, stream, usage)


def _or(given: Number | None, default: Number) -> Number:
    return default if given is None else given


def _message(fields: Fields) -> Json:
    """A message as templates take it: {"role": ..., "content": ...}."""
    role = fields.choice("role", _ROLES)
    if role is None:
        fields.wrong("role", " or ".join(map(repr, _ROLES)))
    content = fields.given("content")
    if isinstance(content, list):
        content = "".join(_part(part) for part in fields.inners("content"))
    elif not isinstance(content, str):
        fields.wrong("content", "a text")
    message: Json = {
        "role": "system" if role == "developer" else role,
        "content": fields.encodable("content", content),
    }
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    if fields.given("refusal") is not None:  # an answer of ours that is sent back has it, as null
        fields.wrong("refusal", "null")
    fields.finish()
    return message


def _part(fields: Fields) -> str:
    if fields.given("type") != "text":
        fields.wrong("type", "'text'; this model reads nothing else")
    text = fields.text("text")
    if text is None:
        fields.wrong("text", "a text")
    fields.finish()
    return text


def _schema(fields: Fields | None) -> Schema | None:
    """The JSON schema of an answer, from its `response_format`."""
    if fields is None:
        return None
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    found: Schema | None = None
    if kind == "json_object":
        found = {"type": "object"}
    elif kind == "json_schema":
        found = _named_schema(fields)
    elif kind is None:
        fields.wrong("type", "'text' or 'json_object' or 'json_schema'")
    fields.finish()
    return found


def _named_schema(outer: Fields) -> Mapping[str, object]:
    fields = outer.inner("json_schema")
    if fields is None:
        outer.wrong("json_schema", 'an object like {"name": "answer", "schema": {...}}')
    for name in ("name", "description"):
        fields.text(name)
    fields.flag("strict")  # answers always are of the schema
    schema = fields.given("schema")
    if not isinstance(schema, dict):
        fields.wrong("schema", "a JSON schema, as an object")
    fields.finish()
    return schema


def _inputs(fields: Fields, name: str) -> list[str | list[int]]:
    """A text, tokens, or a list of texts or of tokens."""
    value = fields.given(name)

    def no_input() -> NoReturn:
        fields.wrong(name, "a text, a list of tokens, or a list of these")

    if isinstance(value, str):
        return [fields.encodable(name, value)]
    if not isinstance(value, list) or not value:
        no_input()
    if _are_tokens(value):
        return [value]
    if len(value) > _MOST_INPUTS:
        raise Refusal(400, f"{name} has {len(value)} texts; {_MOST_INPUTS} are the most", param=name)
    found: list[str | list[int]] = []
    for one in value:
        if isinstance(one, str):
            found.append(fields.encodable(name, one))
        elif isinstance(one, list) and _are_tokens(one):
            found.append(one)
        else:
            no_input()
    return found


def _are_tokens(values: Sequence[object]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in values)


def embedding_value(vector: np.ndarray, packed: bool) -> str | list[float]:
    """A vector as JSON has it: numbers, or base64 of little-endian f32.

    >>> embedding_value(np.array([1.0, -2.0], np.float32), True)
    'AACAPwAAAMA='
    """
    if packed:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
