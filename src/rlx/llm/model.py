"""Language models: `load` one, then `generate`, `stream`, `chat`, `logits`, `embed`, `perplexity`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack, cast

import numpy as np

from rlx.api.options import LoadOptions
from rlx.errors import ConfigError, InputError
from rlx.files import Json
from rlx.llm import late
from rlx.llm.batching.program import key_of, program_of, tokens_alone
from rlx.llm.draft import (
    LOOKUP,
    MOST,
    CheckedConversation,
    Draft,
    Likeliest,
    Lookup,
    NoDraft,
    check_tokenizers,
    step,
)
from rlx.llm.encoders.texts import EncodedTexts
from rlx.llm.prepared.save import save
from rlx.llm.sample import Sampler, Sampling, SamplingOptions, StopWords, log_softmax_at, perplexity_of
from rlx.llm.schema import Guide
from rlx.llm.source import AT_ONCE, Source, open_source
from rlx.llm.text import Message, ModelText, Prompt, Schema

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram


class AnswerOptions(SamplingOptions, total=False):
    """What `stream`, `generate` and `chat` take besides a prompt."""

    max_tokens: int | None
    stop: Sequence[str]
    schema: Schema | None


def load(
    path: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | None = None,
    activations: str | None = None,
    kv: str | None = None,
    context: int | None = None,
    memory_limit: int | str | None = None,
    notify: Callable[[str], None] | None = None,
    **options: Unpack[LoadOptions],
) -> LanguageModel:
    """A language model from a GGUF file, a folder with config.json and safetensors, zoo:ID, or a file that
    `save` wrote. It may be an encoder, like BERT, which has `embed` and no text.

    `context` is how many tokens a conversation may have (by default 4096, or what the model was trained for
    if that is less). `memory_limit`, like "500MiB", is for weights, keys, values and activations together:
    where all weights do not fit, they are read from a file during each step; where that does not help, the
    model is refused. `notify` gets a line for each step of a download. `options` are fields of `rlx.Options`.
    The compiled program is kept in the cache: loading it again takes a moment.

    With `activations` "i8", matmuls with weights of 4 to 8 bits round their rows to 8 bits, group by group,
    and queries, keys and values are bf16: much faster for prompts, and less precise (docs/llm.md has
    figures). The default, "f32", loses nothing. A file that `save` wrote has `activations`, `kv` and
    `context` of the model that was saved.

    With `kv` "i8", keys and values are rounded to 8 bits, with a scale for each token of a head: they take a
    quarter of the memory.

    `draft` is a smaller model with the same tokenizer: it proposes tokens, which the model checks several at
    a time. "lookup" needs no model: it proposes what followed the same tokens earlier in the text. Tokens and
    bits are those of `rlx.llm.Engine`, whatever is proposed; `model.drafted` counts.

    >>> import rlx
    >>> model = rlx.llm.load("zoo:smollm2")  # doctest: +SKIP
    >>> model.chat("What is the capital of France?")  # doctest: +SKIP
    'The capital of France is Paris.'
    """
    source = open_source(path, notify).rounded(activations, kv)
    positions = source.positions(context)
    if source.config.is_encoder:
        if draft is not None or memory_limit is not None:
            raise ConfigError(f"{source.path} is an encoder, which has no draft and no memory_limit")
        return _load_encoder(source, positions, options)
    if draft is not None:
        if memory_limit is not None:
            raise ConfigError("memory_limit does not go with a draft; leave one of them out")
        return _load_checked(source, draft, positions, notify, options)
    if memory_limit is not None:
        options["weight_budget"] = late.weight_budget(source, positions, memory_limit)
    key = key_of(source, positions, tokens_alone(source.config, positions))
    program = program_of(source, key, options)
    if source.config.kv != "f32":
        state = CheckedConversation(program, positions, NoDraft())
        return LanguageModel(source, program, positions, key, options, state)
    return LanguageModel(source, program, positions, key, options)


def _load_encoder(source: Source, positions: int, options: LoadOptions) -> LanguageModel:
    """A model that only turns texts to vectors."""
    key = key_of(source, positions, tokens_alone(source.config, positions))
    program = program_of(source, key, options)
    state = EncodedTexts(program, positions, str(source.path))
    return LanguageModel(source, program, positions, key, options, state)


def _load_checked(
    source: Source,
    draft: str | os.PathLike[str],
    positions: int,
    notify: Callable[[str], None] | None,
    options: LoadOptions,
) -> LanguageModel:
    """A model that checks what a draft proposes."""
    proposes: Draft = Lookup()
    if draft != LOOKUP:
        activations, kv = source.config.activations, source.config.kv
        other = open_source(draft, notify).rounded(activations)
        check_tokenizers(source, other)
        at_most = min(positions, other.config.context) if other.prepared is None else None
        small = load(draft, activations=activations, kv=kv, context=at_most, **options)
        vocabulary = source.tensors["token_embd.weight"].shape[0]
        proposes = Likeliest(small.state, vocabulary)
    key = key_of(source, positions, MOST)
    program = program_of(source, key, options)
    state = CheckedConversation(program, positions, proposes)
    return LanguageModel(source, program, positions, key, options, state)


class LanguageModel(ModelText):
    """A model that is ready to run; `load` makes it. One thread at a time uses it."""

    def __init__(
        self,
        source: Source,
        program: CompiledProgram,
        positions: int,
        key: Json,
        options: LoadOptions,
        state: CheckedConversation | EncodedTexts | None = None,
    ) -> None:
        super().__init__(source)
        self.program, self.positions, self.key, self.options = program, positions, key, options
        self.state: Conversation | CheckedConversation | EncodedTexts
        self.state = Conversation(program, positions) if state is None else state
        self.generated = 0
        """Tokens of the last answer."""

    def __repr__(self) -> str:
        c = self.config
        rounded = ", i8 activations" if c.activations == "i8" else ""
        rounded += ", i8 keys and values" if c.kv == "i8" else ""
        about = f"{c.architecture}, {c.layers} layers of {c.width}{rounded}"
        return f"<language model {self.source.path.name}: {about}>"

    @property
    def drafted(self) -> tuple[int, int]:
        """Tokens that a draft has proposed, and those of them that were taken."""
        state = self.state
        return (state.proposed, state.accepted) if isinstance(state, CheckedConversation) else (0, 0)

    def save(self, path: str | os.PathLike[str], also: Sequence[str] = ()) -> None:
        """Write the model to one file whose name ends in .rlx: programs, weights, tokenizer, chat template,
        settings. `load` and `Engine` take it, and compile nothing on machines like this one; the file that
        the model came from is not needed. `also` names further targets that it shall have code for.

        >>> import rlx
        >>> rlx.llm.load("zoo:smollm2").save("smollm2.rlx")  # doctest: +SKIP
        """
        save(self, path, also)

    # -- text

    def stream_tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        schema: Schema | None = None,
    ) -> Iterator[int]:
        """Tokens that follow a prompt, one by one, up to one that ends the answer (which is left out)."""
        tokens = list(prompt)
        if not tokens:
            raise InputError("the prompt has no tokens; give a text")
        if len(tokens) >= self.positions:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, the context has room for {self.positions}; "
                "shorten it, or load the model with a larger context"
            )
        most = self.positions - len(tokens)
        most = most if max_tokens is None else min(most, max_tokens)
        sampler = Sampler(sampling or Sampling(), tokens)
        ends, self.generated = self.tokenizer.ends, 0
        guide = None if schema is None else Guide(self.vocabulary, schema)
        for _ in range(most):
            logits = self.state.logits(tokens)
            token = sampler.choose(logits, None if guide is None else guide.allowed(len(logits)))
            if token in ends:
                return
            self.generated += 1
            yield token
            tokens.append(token)
            if guide is not None:
                guide.take(token)
                if guide.done:
                    return

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        schema: Schema | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """The text that follows a prompt, piece by piece as it is generated.

        `stop` has words that end it, which are left out. With a JSON `schema` the text is JSON of that schema
        (if it is not cut off). `sampling` are fields of `rlx.llm.Sampling`.
        """
        how = Sampling(**sampling)
        decode, words = self.tokenizer.decoder(), StopWords(stop)
        for token in self.stream_tokens(self.tokens(prompt), max_tokens, how, schema):
            shown = words.add(decode(token))
            if shown:
                yield shown
            if words.found:
                return
        shown = words.add(decode(None))
        shown += "" if words.found else words.rest()
        if shown:
            yield shown

    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> str:
        """The text that follows a prompt; options as for `stream`."""
        return "".join(self.stream(prompt, **options))

    def chat(self, messages: str | Sequence[Message], **options: Unpack[AnswerOptions]) -> str:
        """The answer to a message, or to a conversation [{"role": ..., "content": ...}, ...]."""
        return self.generate(self.prompt(messages), **options)

    # -- numbers

    def logits(self, prompt: Prompt) -> np.ndarray:
        """Logits [tokens, vocabulary] of what follows each token of a prompt."""
        return self._all(prompt, "logits")

    def embed(self, prompt: Prompt | Sequence[str]) -> np.ndarray:
        """A text as a vector, several as rows of a matrix; a text's bits do not depend on the others.

        The vector is the mean of the features of its tokens, of length 1, unless the model's folder has
        another pooling.
        """
        many = not isinstance(prompt, str) and any(isinstance(one, str) for one in prompt)
        texts = [self._fitting(one) for one in cast("Sequence[Prompt]", prompt if many else [prompt])]
        state = self.state
        if isinstance(state, EncodedTexts):
            found = state.features(texts)
        else:
            found = (state.every(tokens, "hidden") for tokens in texts)
        vectors = np.stack([self.source.pooling(features) for features in found])
        return vectors if many else np.asarray(vectors[0])

    def _fitting(self, prompt: Prompt) -> list[int]:
        tokens = self.tokens(prompt)
        if not 1 <= len(tokens) <= self.positions:
            raise InputError(f"{len(tokens)} tokens; the context has room for 1 to {self.positions}")
        return tokens

    def _all(self, prompt: Prompt, output: str) -> np.ndarray:
        return self.state.every(self._fitting(prompt), output)

    def perplexity(self, prompt: Prompt, window: int = 512) -> float:
        """How surprised the model is by a text: exp of the mean of -log p(token | those before it).

        The text is cut into windows of that many tokens, each read on its own.
        """
        tokens, window = self.tokens(prompt), min(window, self.positions)
        if len(tokens) < 2 or window < 2:
            raise InputError("perplexity needs two tokens or more")
        logs = []
        for at in range(0, len(tokens) - 1, window):
            part = tokens[at : at + window]
            if len(part) > 1:
                logits = self.state.every(part, "logits")[:-1]
                logs.append(log_softmax_at(logits, np.array(part[1:])))
        return perplexity_of(np.concatenate(logs))


class Conversation:
    """Keys and values of the tokens that were computed; what a new text has in common with them is kept."""

    def __init__(self, program: CompiledProgram, positions: int) -> None:
        self.stream, self.positions = program.stream(), positions
        self.tokens: list[int] = []

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start are in the caches."""
        least = min(len(tokens), len(self.tokens))
        return next((i for i in range(least) if tokens[i] != self.tokens[i]), least)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of what follows the last token."""
        past = min(self.common(tokens), len(tokens) - 1)
        return np.asarray(self.run(tokens, past, "logits", last=True)[0])

    def every(self, tokens: Sequence[int], output: str) -> np.ndarray:
        """An output for all tokens."""
        return self.run(tokens, 0, output, last=False)

    def run(self, tokens: Sequence[int], past: int, output: str, last: bool) -> np.ndarray:
        del self.tokens[past:]
        found = []
        for at in range(past, len(tokens), AT_ONCE):
            part = np.array(tokens[at : at + AT_ONCE], np.int64)
            ends = at + len(part) == len(tokens)
            wanted = np.arange(len(part)) if not last else np.arange(len(part) - 1, len(part))[: int(ends)]
            out = step(self, {"past": at, "tokens": part, "wanted": wanted})
            self.tokens += part.tolist()
            if len(wanted):
                found.append(out[output])
        return found[0] if len(found) == 1 else np.concatenate(found)
