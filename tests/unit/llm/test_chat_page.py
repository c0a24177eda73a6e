"""Chat templates and tokenizers as data for pages, and what has no page."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from rlx.errors import UnsupportedError
from rlx.llm.chat_page import chat_page, in_javascript, turns
from rlx.llm.template import Template
from rlx.llm.tokens import _SPLITS

PLAIN = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>Be kind.</s>{% endif %}"
    "<{{ m.role }}>{{ m.content FILTER }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def plain(filter: str = "") -> str:
    return PLAIN.replace("FILTER", filter)


COUNTS = "{{ messages | length }}" + plain()
SHOUTS = plain("| upper")


def pieces(source: str) -> object:
    template = Template(source)
    return turns(lambda messages: template(messages=list(messages), add_generation_prompt=True))


def test_templates_become_texts_between_messages() -> None:
    expected = {
        "first": "<s>Be kind.</s><user>",
        "answer": "</s><assistant>",
        "next": "</s><user>",
        "system": ["<system>", "</s><user>"],
        "trim": False,
    }
    assert pieces(plain()) == expected
    assert pieces(plain("| trim")) == {**expected, "trim": True}
    assert pieces(NO_SYSTEM + plain()) == {**expected, "system": None}


@pytest.mark.parametrize("source", [COUNTS, SHOUTS, "{{ messages[-1].content }}"])
def test_templates_that_do_more_are_not_taken(source: str) -> None:
    assert pieces(source) is None


def model(rules: object, source: str) -> object:
    template = Template(source)
    return SimpleNamespace(
        source=SimpleNamespace(path="x.gguf"),
        tokenizer=SimpleNamespace(rules=rules),
        prompt_text=lambda messages: template(messages=list(messages), add_generation_prompt=True),
    )


def test_models_without_a_page_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"x\.gguf has no chat page: pages know byte-level tokenizers"):
        chat_page(model(None, plain()), "x")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="its chat template does more than"):
        chat_page(model(object(), COUNTS), "x")  # type: ignore[arg-type]


def test_all_ways_to_cut_text_have_a_page() -> None:
    for splits in _SPLITS.values():
        for split in splits:
            assert not re.search(r"\\[sS]|\(\?i", in_javascript(split))
    with pytest.raises(UnsupportedError, match="has no page"):
        in_javascript("(?i:x)")
