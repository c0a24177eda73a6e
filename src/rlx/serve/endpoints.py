"""What the paths under /v1 do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rlx.errors import InternalError, RlxError
from rlx.llm.batching.sequence import Deliver, Generation, Piece, Request
from rlx.llm.engine import Engine, QueueFull
from rlx.serve.answers import ChatAnswer, TextAnswer
from rlx.serve.body import read_json
from rlx.serve.job import Job, Waiting
from rlx.serve.metrics import Metrics
from rlx.serve.refusal import Json, Refusal
from rlx.serve.requests import (
    SCHEMA,
    Asked,
    Served,
    embedding_value,
    read_chat,
    read_completion,
    read_embeddings,
)
from rlx.serve.stream import EventStream

_PREPARING = 4  # threads that turn text to tokens
_EMBEDDING = 2  # threads that wait for embeddings
_MOST_EMBEDDING = 64  # requests for embeddings that may wait


class Endpoints:
    """Chats, completions, embeddings and the list of models."""

    def __init__(self, engine: Engine, served: Served, metrics: Metrics, timeout: float) -> None:
        self.engine, self.served = engine, served
        self._metrics, self._timeout, self._started = metrics, timeout, int(time.time())
        self._preparing = _started_pool(_PREPARING, "rlx-prepare")
        self._embedding = _started_pool(_EMBEDDING, "rlx-embed")
        self._waiting_embeddings = 0

    def close(self) -> None:
        for pool in (self._preparing, self._embedding):
            pool.shutdown(wait=False, cancel_futures=True)

    async def chat(self, http: HttpRequest) -> Response:
        self._check_writes()
        deadline = self._deadline()
        found = read_chat(await read_json(http, deadline), self.served)
        texts = [str(message["content"]) for message in found.messages]

        def prompt() -> list[int]:
            return self._tokens("messages", texts, lambda: self.engine.prompt(found.messages))

        answer = ChatAnswer(self.served.name, self.engine.tokenizer, found.asked.logprobs is not None)
        return await self._generate(http, deadline, found.asked, answer, prompt)

    async def completion(self, http: HttpRequest) -> Response:
        self._check_writes()
        deadline = self._deadline()
        found = read_completion(await read_json(http, deadline), self.served)
        answer = TextAnswer(self.served.name, self.engine.tokenizer, found.asked.logprobs is not None)
        return await self._generate(
            http, deadline, found.asked, answer, lambda: self._input("prompt", found.prompt)
        )

    def _check_writes(self) -> None:
        """Refuse what an encoder cannot do, before anything is read."""
        if self.engine.config.is_encoder:
            text = (
                f"the model {self.served.name!r} is an encoder: it serves /v1/embeddings and writes no text"
            )
            raise Refusal(400, text, param="model", code="model_not_supported")

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _generate(
        self,
        http: HttpRequest,
        deadline: float,
        asked: Asked,
        answer: ChatAnswer,
        prompt: Callable[[], list[int]],
    ) -> Response:
        def submit(deliver: Deliver) -> Generation:
            tokens = tuple(prompt())
            request = Request(
                tokens, asked.max_tokens, asked.sampling, asked.stop, asked.schema, asked.logprobs
            )
            with _clients_mistake(SCHEMA):  # all else was checked
                return self.engine.submit(request, deliver)

        with ExitStack() as stack:
            job = Job(Waiting(http, deadline), self._metrics)
            stack.callback(job.close)
            loop = asyncio.get_running_loop()
            await job.waiting.wait(loop.run_in_executor(self._preparing, job.submit, submit))
            if asked.stream:
                stack.pop_all()  # the stream closes it
                return EventStream(job, answer, asked.usage)
            pieces: list[Piece | None] = []
            while not pieces or pieces[-1] is not None:
                pieces += await job.next()
            return Json(answer.whole([piece for piece in pieces if piece is not None], job.generation))

    # -- tokens

    def _input(self, param: str, given: str | list[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already."""
        if isinstance(given, str):
            return self._tokens(param, [given], lambda: self.engine.tokens(given))
        known = len(self.engine.tokenizer.tokens)
        wrong = next((token for token in given if not 0 <= token < known), None)
        if wrong is not None:
            raise Refusal(
                400, f"{param}: the model has tokens from 0 to {known - 1}, not {wrong}", param=param
            )
        return self._tokens(param, [], lambda: given)

    def _tokens(self, param: str, texts: Sequence[str], encode: Callable[[], list[int]]) -> list[int]:
        """What `encode` makes of these texts, if that is a prompt that fits the context."""
        most, characters = self.engine.longest, sum(map(len, texts))
        if characters > most * self._longest:  # it need not be cut into tokens to know this
            raise _too_long(param, f"{characters} characters", most)
        with _clients_mistake(param):
            tokens = encode()
        if len(tokens) > most - (param != "input"):  # an answer needs one of them
            raise _too_long(param, f"{len(tokens)} tokens", most)
        if not tokens:
            raise Refusal(400, f"{param}: the prompt has no tokens; give a text", param=param)
        return tokens

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token: a text of more characters has more tokens than one."""
        tokenizer = self.engine.tokenizer
        return max((len(tokenizer.bytes_of(token)) for token in range(len(tokenizer.tokens))), default=1)

    # -- others

    async def embeddings(self, http: HttpRequest) -> Response:
        deadline = self._deadline()
        found = read_embeddings(await read_json(http, deadline), self.served)
        if self._waiting_embeddings >= _MOST_EMBEDDING:
            raise QueueFull(f"{_MOST_EMBEDDING} requests for embeddings wait already; try again later")
        waiting, loop = Waiting(http, deadline), asyncio.get_running_loop()
        self._waiting_embeddings += 1
        try:
            data, count = [], 0
            for i, given in enumerate(found.inputs):
                tokens = await waiting.wait(
                    loop.run_in_executor(self._preparing, self._input, "input", given)
                )
                vector = await waiting.wait(loop.run_in_executor(self._embedding, self.engine.embed, tokens))
                count += len(tokens)
                data.append(
                    {"object": "embedding", "index": i, "embedding": embedding_value(vector, found.base64)}
                )
        finally:
            self._waiting_embeddings -= 1
            waiting.close()
        self._metrics.prompt.add(count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return Json({"object": "list", "data": data, "model": self.served.name, "usage": usage})

    async def models(self, http: HttpRequest) -> Response:
        return Json({"object": "list", "data": [self._about()]})

    async def one_model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self.served.name:
            raise Refusal(
                404, f"the model {name[:100]!r} is not here; {self.served.name!r} is", code="model_not_found"
            )
        return Json(self._about())

    def _about(self) -> dict[str, object]:
        return {"id": self.served.name, "object": "model", "created": self._started, "owned_by": "rlx"}


def _started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run. By itself it starts them one by one as requests meet, so that the memory
    of a server would grow by chance.
    """
    pool, here = ThreadPoolExecutor(threads, name), threading.Barrier(threads)
    for future in [pool.submit(here.wait) for _ in range(threads)]:
        future.result()
    return pool


@contextmanager
def _clients_mistake(param: str) -> Iterator[None]:
    """What RLX refuses inside is a mistake in this field of the request."""
    try:
        yield
    except (Refusal, QueueFull, InternalError):
        raise
    except RlxError as error:
        raise Refusal(400, f"{param}: {error}", param=param) from None


def _too_long(param: str, size: str, most: int) -> Refusal:
    return Refusal(
        400,
        f"the prompt has {size}; the context has room for {most} tokens, and an answer needs one of them",
        param=param,
        code="context_length_exceeded",
    )
