"""Text and tokens of a model: prompts, conversations, schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from rlx.llm.schema import Vocabulary
from rlx.llm.source import Source
from rlx.llm.tokens import Tokenizer

Message = Mapping[str, object]
Schema = Mapping[str, object] | bool
Prompt = str | Sequence[int]


class ModelText:
    """What a model file says about text. Models and engines are this, too."""

    def __init__(self, source: Source) -> None:
        self.source, self.config = source, source.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as schemas need them; it takes a second."""
        return Vocabulary(self.tokenizer)

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens; one that is tokens already stays as it is."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def prompt(self, messages: str | Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the model answers, by the model's chat template."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.encode(self.prompt_text(messages), control=True)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What the model's chat template makes of a conversation."""
        tokenizer = self.tokenizer
        ends = sorted(tokenizer.ends)
        return self.source.template(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            bos_token="" if tokenizer.begin is None else tokenizer.tokens[tokenizer.begin],
            eos_token=tokenizer.tokens[ends[0]] if ends else "",
        )
