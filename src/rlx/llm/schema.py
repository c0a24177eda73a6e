"""Answers that are JSON of a given schema: of the next tokens, only those that continue it may be chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from rlx.errors import ConfigError, UnsupportedError, how_to_install
from rlx.llm.tokens import Tokenizer

# On one line: a small model may else write empty lines for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            f"answers by a JSON schema need the package llguidance; {how_to_install('llm')}"
        ) from None
    return llguidance


class Vocabulary:
    """The tokens of a model, as the package takes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [tokenizer.bytes_of(i) for i in range(len(tokenizer.tokens))]
        self.special_token_ids = [i for i, piece in enumerate(self.tokens) if not piece]
        for i in self.special_token_ids:  # the mark of what is not text
            self.tokens[i] = b"\xff<" + str(i).encode() + b">"
        self.eos_token_id = min(tokenizer.ends, default=0)
        self.bos_token_id = tokenizer.begin
        self._encode = tokenizer.plain
        package = _llguidance()
        wrapper = package.TokenizerWrapper(self)
        self.made = package.LLTokenizer(wrapper, eos_token=sorted(tokenizer.ends) or None)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class Guide:
    """One answer by a schema: which tokens may come next."""

    def __init__(self, vocabulary: Vocabulary, schema: Mapping[str, object] | bool) -> None:
        matcher = _llguidance().LLMatcher
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema is not JSON: {error}") from None
        grammar = matcher.grammar_from_json_schema(text, defaults=_WRITTEN)
        self._matcher = matcher(vocabulary.made, grammar, log_level=0)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = (self._matcher.get_error().splitlines() or ["no reason given"])[0]
            raise ConfigError(f"the JSON schema cannot be used with this model: {why[:400]}")

    def allowed(self, count: int) -> np.ndarray:
        """For each of `count` tokens whether it may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little").astype(bool)
        return np.resize(found, count) if len(found) >= count else np.pad(found, (0, count - len(found)))

    def take(self, token: int) -> None:
        """The token that was chosen."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())
