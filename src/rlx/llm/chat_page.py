"""A language model's chat page for the browser: its tokenizer and its chat template as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

from rlx.errors import FormatError, UnsupportedError
from rlx.files import Json
from rlx.llm.model import LanguageModel
from rlx.llm.tokens import CONTROL, UNKNOWN, UNUSED, USER, Tokenizer
from rlx.runtime.exported import Page

Render = Callable[[Sequence[dict[str, str]]], str]

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_EITHER_CASE = "(?:'(?:[sS\\u017f]|[tTmMdD]|[rRvV][eE]|[lL][lL]))"
_AWKWARD = ("  two blanks  ", "line\none\n\n", "<|im_end|> {{ x }}", "Ünïcödé 🙂")
"""Contents that a template might change."""


def chat_page(model: LanguageModel, called: str) -> Page:
    """The page for conversations with a model that is `called` so.

    UnsupportedError, with the reason, if its tokenizer or its template is not one that pages know.
    """
    name = model.source.path
    if model.tokenizer.rules is None:
        raise UnsupportedError(
            f"{name} has no chat page: pages know byte-level tokenizers of GGUF files only; leave out --page"
        )
    pieces = turns(model.prompt_text)
    if pieces is None:
        raise UnsupportedError(
            f"{name} has no chat page: its chat template does more than to put texts around messages; "
            "leave out --page"
        )
    settings = {"template": pieces, "context": model.positions}
    tokens = json.dumps(tokenizer_data(model.tokenizer), ensure_ascii=False, separators=(",", ":"))
    return Page("chat", f"Chat with {called}", settings, {"tokenizer.json": tokens.encode()})


def tokenizer_data(tokenizer: Tokenizer) -> Json:
    """What bpe.mjs reads."""
    assert tokenizer.rules is not None, "asked only of byte-level tokenizers"
    silent = (CONTROL, UNKNOWN, UNUSED)
    return {
        "tokens": list(tokenizer.tokens),
        "silent": [i for i, kind in enumerate(tokenizer.kinds) if kind in silent],
        "users": [i for i, kind in enumerate(tokenizer.kinds) if kind == USER],
        "named": {**tokenizer.users, **tokenizer.specials},
        "begin": tokenizer.begin,
        "ends": sorted(tokenizer.ends),
        "splits": [in_javascript(split) for split in tokenizer.rules.splits],
        "merges": list(tokenizer.rules.merges),
        "whole": tokenizer.rules.whole,
    }


def in_javascript(split: str) -> str:
    """A regular expression of a tokenizer in JavaScript's words; white space is another set there.

    >>> in_javascript("\\\\s+(?!\\\\S)")
    '\\\\p{White_Space}+(?!\\\\P{White_Space})'
    """
    made = split.replace(_ENDINGS, _EITHER_CASE)
    made = made.replace("\\s", "\\p{White_Space}").replace("\\S", "\\P{White_Space}")
    if "(?i" in made:
        raise UnsupportedError(f"text cut by {split!r} has no page")
    return made


def turns(render: Render) -> Json | None:
    """A chat template as the texts between messages; None if it does more than to put texts there.

    `first` stands before the first message, or `system` around one of the system, if there may be one.
    `answer` stands between a message and its answer, `next` between an answer and the next message. `trim`
    says that messages lose their outer blanks.

    >>> turns(lambda messages: "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")
    {'first': '[user]', 'answer': '[assistant]', 'next': '[user]', 'system': ['[system]', '[user]'],
     'trim': False}
    """
    one, asked, answered, again = (f"\ue000{i}\ue001" for i in range(4))
    plain = _cut(render(_conversation(asked, answered, again)), asked, answered, again)
    try:
        opened = _cut(render([_system(one), *_conversation(asked)]), one, asked)
    except FormatError:  # the template refuses such messages
        opened = None
    if plain is None or plain[1] != plain[3]:
        return None
    made = {"first": plain[0], "answer": plain[1], "next": plain[2], "system": opened and opened[:2]}
    cases = [_conversation(*(_AWKWARD * 2)[i : i + n]) for i in range(len(_AWKWARD)) for n in (1, 3, 5)]
    if opened is not None:
        cases += [[_system(text), *cases[0]] for text in _AWKWARD]
    for trim in (False, True):
        if all(_prompt(made, trim, case) == render(case) for case in cases):
            return {**made, "trim": trim}
    return None


def _cut(text: str, *marks: str) -> list[str] | None:
    """What is between marks in a text, before and after them; None if one of them is not there."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _conversation(*contents: str) -> list[dict[str, str]]:
    """Messages of the user and answers, in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def _prompt(pieces: Json, trim: bool, messages: Sequence[dict[str, str]]) -> str:
    """What chat.mjs makes of a conversation."""
    texts = [message["content"].strip() if trim else message["content"] for message in messages]
    if messages[0]["role"] == "system":
        made = pieces["system"][0] + texts[0] + pieces["system"][1]
        texts = texts[1:]
    else:
        made = pieces["first"]
    between = (pieces["answer"], pieces["next"])
    made += "".join(text + between[i % 2] for i, (text, _) in enumerate(pairwise(texts)))
    return made + texts[-1] + pieces["answer"]
