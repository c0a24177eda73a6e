"""Answers that are JSON of a given schema: of the next tokens, only those that continue it may be chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from rlx.errors import ConfigError, UnsupportedError, how_to_install
from rlx.llm.tokens import Tokenizer

# On one line: a small model may else write empty lines for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_MOST_STATES = 20_000  # of the automaton of a schema, 1 or 2 kB each


class SchemaError(ConfigError):
    """A JSON schema that cannot be used, which may show only while an answer is made."""


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
        package = _llguidance()
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"the JSON schema is not JSON: {error}") from None
        limits = package.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        with _refused():
            grammar = package.LLMatcher.grammar_from_json_schema(text, defaults=_WRITTEN)
            self._matcher = package.LLMatcher(vocabulary.made, grammar, log_level=0, limits=limits)
        self._check()
        self._bits: bytes | None = None
        self.allowed(0)  # a schema that allows nothing, or too much, shows here

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unusable(self._matcher.get_error())

    def allowed(self, count: int) -> np.ndarray:
        """For each of `count` tokens whether it may come next."""
        if self._bits is None:
            with _refused():
                self._bits = self._matcher.compute_bitmask()
            self._check()
        found = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little").astype(bool)
        return np.resize(found, count) if len(found) >= count else np.pad(found, (0, count - len(found)))

    def take(self, token: int) -> None:
        """The token that was chosen."""
        self._bits = None
        with _refused():
            self._matcher.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())


@contextmanager
def _refused() -> Iterator[None]:
    """What the package raises is the fault of the schema; a panic of its native code is, too."""
    try:
        yield
    except ValueError as error:
        raise _unusable(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it is no Exception
            raise
        raise _unusable(str(error)) from None


def _unusable(why: str) -> SchemaError:
    first = (why.splitlines() or ["no reason given"])[0]
    return SchemaError(f"the JSON schema cannot be used with this model: {first[:400]}")
