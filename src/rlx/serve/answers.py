"""Answers as OpenAI's clients read them: whole, and as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from rlx.config import VERSION
from rlx.files import Json
from rlx.llm.batching.sequence import Generation, Piece
from rlx.llm.tokens import Tokenizer

_LEAST = -9999.0  # the logarithm of a chance that is 0, which JSON cannot say


def usage_of(generation: Generation) -> Json:
    """The counts of tokens."""
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


class ChatAnswer:
    """What /v1/chat/completions sends."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer, chances: bool) -> None:
        self.tokenizer, self.chances = tokenizer, chances
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"rlx-{VERSION}",
        }

    def whole(self, pieces: Sequence[Piece], generation: Generation) -> Json:
        """The answer in one document."""
        text = "".join(piece.text for piece in pieces)
        choice = {
            "index": 0,
            **self.of_text(text),
            "logprobs": self.logprobs(pieces, 0),
            "finish_reason": generation.finish_reason,
        }
        return {**self.head, "object": self.whole_kind, "choices": [choice], "usage": usage_of(generation)}

    def of_text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def first(self) -> Json | None:
        """The chunk that a stream begins with."""
        return self._chunk({"delta": {"role": "assistant", "content": "", "refusal": None}})

    def chunk(self, piece: Piece, offset: int) -> Json:
        """One piece; `offset` is how many characters came before it."""
        return self._chunk(self.delta(piece.text), self.logprobs([piece], offset))

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def last(self, reason: str | None) -> Json:
        return self._chunk(self.end(), reason=reason)

    def end(self) -> Json:
        return {"delta": {}}

    def counts(self, generation: Generation) -> Json:
        """The chunk with the counts of tokens, after all others."""
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": usage_of(generation)}

    def _chunk(self, what: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": 0, **what, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head, "object": self.chunk_kind, "choices": [choice]}

    def logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        if not self.chances:
            return None
        content = [
            {
                **self._token(piece.token, piece.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in piece.top],
            }
            for piece in pieces
            if piece.token is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Json:
        stands_for = self.tokenizer.bytes_of(token)
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": list(stands_for)}

    def name(self, token: int) -> str:
        """What a token stands for; a control token for its name."""
        stands_for = self.tokenizer.bytes_of(token)
        return stands_for.decode("utf-8", "replace") if stands_for else self.tokenizer.tokens[token]


class TextAnswer(ChatAnswer):
    """What /v1/completions sends."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def of_text(self, text: str) -> Json:
        return {"text": text}

    def first(self) -> Json | None:
        return None

    delta = of_text

    def end(self) -> Json:
        return {"text": ""}

    def logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        if not self.chances:
            return None
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            if piece.token is not None:
                found["tokens"].append(self.name(piece.token))
                found["token_logprobs"].append(_finite(piece.logprob))
                found["top_logprobs"].append({self.name(t): _finite(logprob) for t, logprob in piece.top})
                found["text_offset"].append(offset)
            offset += len(piece.text)
        return found


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
