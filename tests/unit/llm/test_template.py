"""Chat templates: the texts that jinja2 gives, and templates that try to get out."""

# ruff: noqa: E501 - templates are written as models have them

from __future__ import annotations

import datetime
import json
import subprocess
import sys

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


def _again_and_again(name: str) -> str:
    """Lists of which each is twice in the next, which were filled after they were put there."""
    made = [f"{{% set {name}{i} = [] %}}" for i in range(45)]
    filled = [f"{{% do {name}{i}.append({name}{i - 1}) %}}" * 2 for i in range(44, 0, -1)]
    return "".join(made + filled)


_LISTS, _TWO = _again_and_again("a"), _again_and_again("a") + _again_and_again("b")
_LONG = "{% set x = 'abcdefgh' %}" + "{% set x = x ~ x %}" * 19
_NAMES = "".join(f"{{% set a{i} = 1 %}}" for i in range(20_000))
_DEEP = "".join(f"{{% set a{i} = [] %}}" for i in range(700))
_DEEP += "".join(f"{{% do a{i}.append(a{i - 1}) %}}" for i in range(699, 0, -1))
_DEEP += "{% for i in range(30000) %}{% do a0.append(1) %}{% endfor %}"
HUNGRY = {
    "a list of lists as text": _LISTS + "{{ a44 }}",
    "joined to a text": _LISTS + "{{ a44 ~ '' }}",
    "as the reason of a refusal": _LISTS + "{{ raise_exception(a44) }}",
    "two of them compared": _TWO + "{{ a44 is eq(b44) }}",
    "one in a list": _TWO + "{{ a44 is in([b44]) }}",
    "selected": _TWO + "{{ [a44] | select('eq', b44) | length }}",
    "a wide format as a test": "{{ '%2000000000d' is odd }}",
    "slices that are kept": _LONG + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(2000)),
    "slices in a loop": _LONG + "{% for i in range(90000) %}{% set y = x[1:] %}{% endfor %}",
    "separators": _LONG + "{{ range(2000) | list | tojson(separators=(x, ':')) }}",
    "indents": _DEEP + "{{ a699 | tojson(indent=16) }}",
    "a search for many texts": _LONG + "{{ range(99999) | map('string') | select('in', x) | list | length }}",
    "names for every element": _NAMES + "{% for i in range(100000) if false %}{% endfor %}",
    "names for every call": _NAMES
    + "{% macro m() %}{% endmacro %}{% for i in range(60000) %}{{ m() }}{% endfor %}",
}
_CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from rlx.errors import FormatError
from rlx.llm.template import Template
for name, source in json.load(sys.stdin).items():
    try:
        print(name, "gives", Template(source)(messages=[])[:99])
    except FormatError as error:
        if "(Stop)" not in str(error) and "refuses" not in str(error):
            print(name, "ends with", error)
print("end")
"""


def test_templates_that_take_too_much_memory_or_time() -> None:
    """All of them are stopped by the limits of templates, not by those of the process."""
    command = [sys.executable, "-c", _CHILD]
    done = subprocess.run(command, input=json.dumps(HUNGRY), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "end\n"), done


def test_what_is_not_defined_has_no_address() -> None:
    assert Template("{{ [1] | map(attribute='x') | list }}")() == "[Undefined]"


@pytest.mark.parametrize(("count", "words"), [(1000, 200), (100, 2000)])
def test_long_conversations_are_within_the_limits(count: int, words: int) -> None:
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": "word " * words} for i in range(count)]
    messages = [MESSAGES[0], *talk]
    for source in TEMPLATES.values():
        made = Template(source)(messages=messages, bos_token="", eos_token="")
        assert len(made) > count


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 5000 + " }}",
        "{% for",
        "{{ 1 + }}",
        "{% if x %}",
        "{{" + "[" * 5000,
        "{{" + "-" * 5000 + "1}}",
    ],
)
def test_templates_that_are_not_valid(source: str) -> None:
    with pytest.raises(FormatError, match="the chat template"):
        Template(source)()


def test_a_very_long_template() -> None:
    with pytest.raises(FormatError, match="2000000 characters"):
        Template("x" * 2_000_000)


def test_dates_only_where_a_template_insists() -> None:
    """gpt-oss writes the date of today; Llama has another text where it cannot."""
    year = str(datetime.date.today().year)
    assert Template("on {{ strftime_now('%d %b %Y') }}")().endswith(year)
    asks = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert Template(asks)() == "2024"
    for form in ("%H:%M", "%s", "%" * 200, "%Y%c"):
        with pytest.raises(FormatError, match="asks for the date as"):
            Template("{{ strftime_now(form) }}")(form=form)


def test_a_template_like_that_of_gpt_oss() -> None:
    text = """
{%- macro kind(spec, required, nullable=false) -%}
    {%- if spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") -}}
    {%- elif spec.parts -%}{{- kind(spec.parts, required) + "[]" -}}{%- endif -%}
{%- endmacro -%}
{%- macro system() -%}
    {%- if identity is not defined -%}{%- set identity = "You are a model." -%}{%- endif -%}
    {{- identity + "\\nDate: " + strftime_now("%Y-%m-%d") -}}
{%- endmacro -%}
{{- "<|start|>system<|message|>" -}}{{- system() -}}{{- "<|end|>" -}}
{%- set rest = messages[1:] if messages[0].role in ("developer", "system") else messages -%}
{%- for message in rest -%}
    {%- set later = namespace(found=false) -%}
    {%- for other in rest[loop.index:] -%}
        {%- if other.role == "assistant" and "calls" not in other -%}{%- set later.found = true -%}{%- endif -%}
    {%- endfor -%}
    {{- "<|start|>" + message.role + (" later" if later.found else "") + "<|message|>" + message.content -}}
{%- endfor -%}
{{- kind({"parts": {"type": ["a", "b"]}}, []) -}}
"""
    messages = [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user")]
    today = datetime.date.today().isoformat()
    want = f"<|start|>system<|message|>You are a model.\nDate: {today}<|end|><|start|>user later<|message|>u"
    want += "<|start|>assistant<|message|>a<|start|>user<|message|>ua | b[]"
    assert Template(text)(messages=messages).strip() == want
