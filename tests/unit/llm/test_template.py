"""Chat templates: the texts that jinja2 gives, and templates that try to get out."""

# ruff: noqa: E501 - templates are written as models have them

from __future__ import annotations

import json

import jinja2
import pytest

from rlx.errors import FormatError
from rlx.llm.template import Template

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi <b>there</b> "},
    {
        "role": "assistant",
        "content": "Hello.",
        "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": "ä"}}],
    },
    {"role": "user", "content": "What's 2 < 3?"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +
        '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content =
        '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
        {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages[1:] %}{% if (message['role'] == 'user') != (loop.index0 % 2
        == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set role = 'model' if
        message.role == 'assistant' else message.role %}{{ '<start_of_turn>' ~ role ~ '\n' ~ (message['content'] |
        trim) ~ '<end_of_turn>\n' }}{% endfor %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ['user', 'assistant'] %}
    {%- set ns.index = ns.index + 1 %}
    {%- if loop.last and system_message is defined %}
        {{- "[INST]" + system_message + "\n\n" + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "user" %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- else %}none{%- endfor %}{{ ns.index }}""",
    "qwen": """{%- macro call(c, mark='') -%}{{ mark }}{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}
{%- endmacro %}
{%- if tools %}tools{% else %}none{% endif %}
{%- for m in messages %}
{%- if m.tool_calls is defined and m.tool_calls | length > 0 %}
{%- for c in m.tool_calls %}{{ call(c, mark='>') }}{% if not loop.last %}, {% endif %}{% endfor %}
{%- elif m.content is string and m.content.startswith('What') %}{{ m.content.split(' ')[-1] | upper }}
{%- else %}{{ loop.index }}:{{ m.role | capitalize }}{% continue %}{% endif %}|{% endfor -%}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto',
        'user') | list | length }} {{ (messages | first).content }} {{ messages | last | tojson(indent=2) }}
        {{ missing | default('none') }} {{ missing is defined }} {{ {'b': 1, 'a': [1, 2.5, none, true]} | tojson }}
        {{ 'a-b-c'.replace('-', '+') | indent(2) }} {{ [3, 1, 2] | sort }}
        {{ 7 // 2 }} {{ 7 % 4 }} {{ -3 + 1.5 }} {{ not true }} {{ 1 < 2 <= 2 }} {{ 'x' in 'xyz' }} {{ 'é' | upper }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_jinja2(name: str) -> None:
    source = TEMPLATES[name]
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    values = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    if name == "gemma":
        environment.globals["raise_exception"] = pytest.fail
    assert Template(source)(**values) == environment.from_string(source).render(**values)


def test_a_template_may_refuse() -> None:
    with pytest.raises(FormatError, match="refuses these messages: no system"):
        Template("{{ raise_exception('no system') }}")()


ESCAPES = {
    "class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "function's globals": "{{ raise_exception.__globals__['os'] }}",
    "method's globals": "{{ namespace.__init__.__globals__.x }}",
    "macro's code": "{% macro f() %}{% endmacro %}{{ f.__code__.co_consts }}",
    "loop's fields": "{% for i in [1] %}{{ loop.items.x }}{% endfor %}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a}'.format_map({}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{% endblock %}{{ self.a() }}",
    "call": "{% call(x) f() %}{% endcall %}",
    "lipsum": "{{ lipsum() }}",
    "cycler": "{{ cycler('a').next() }}",
    "star": "{{ range(*[1]) }}",
    "unknown filter": "{{ 1 | pprint }}",
    "unknown test": "{{ 1 is sameas 1 }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_templates_that_try_to_get_out(name: str) -> None:
    with pytest.raises(FormatError, match="the chat template fails"):
        Template(ESCAPES[name])(messages=[])


GREEDY = {
    "many steps": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10000000000) %}{% endfor %}",
    "a text times a number": "{{ 'a' * 1000000000 }}",
    "a list times a number": "{{ [1] * 1000000000 }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "replacing": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', 'aaaaaaaa') %}"
    "{% endfor %}",
    "lists of lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "lists in lists": "{% set a = [] %}{% set b = [a] %}{% do a.append(b) %}{{ a == b }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep lists": "{% set n = namespace(x=[]) %}{% for i in range(50000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_templates_that_take_too_much(name: str) -> None:
    with pytest.raises(FormatError, match="the chat template fails"):
        Template(GREEDY[name])(messages=[])


@pytest.mark.parametrize(
    "source", ["{% for", "{{ 1 + }}", "{% if x %}", "{{" + "[" * 5000, "{{" + "-" * 5000 + "1}}"]
)
def test_templates_that_are_not_valid(source: str) -> None:
    with pytest.raises(FormatError, match="the chat template"):
        Template(source)()


def test_a_very_long_template() -> None:
    with pytest.raises(FormatError, match="2000000 characters"):
        Template("x" * 2_000_000)
