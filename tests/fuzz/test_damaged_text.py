"""Damaged texts and files: whatever is read, the answer is a sound graph or an RlxError, and soon."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import ALL_CASES
from sample_graphs import GRAPHS

from measured import unit
from rlx.errors import FormatError, ParseError
from rlx.ir.text.files import load
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify

MOST_UNITS = 5000  # of CPU time, some 5 s: a text that the reader gets lost in takes for ever
TOKENS = [
    *'%{}[]()=,:@#"`*+-./\\\n',
    *"0 1 -1 7 1.5 1e9 99999999999999999999 nan inf none true false f32 i64 bool c64 u4".split(),
    *"n {n} {2*n+1} {n//0} f32[n] f32[] () .. // ** ceildiv( min( blob: %0 %1 %99".split(),
    *"graph symbol assume inputs output state in eq multiple input constant result region".split(),
    *"exp reshape axis= shape= value= name=".split(),
]


@functools.cache
def corpus() -> list[str]:
    """Texts of sample graphs and of one sample of every op."""
    texts = [graph_text(build()) for build in GRAPHS.values()]
    last = {c.op.name: c for c in ALL_CASES}
    return texts + [graph_text(c.graph()[0]) for c in last.values()]


@st.composite
def damaged(draw: Any) -> str:
    text: str = draw(st.sampled_from(corpus()))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 20)))
        kind = draw(st.sampled_from(["delete", "insert", "replace", "repeat", "move", "character"]))
        if kind == "delete":
            text = text[:start] + text[stop:]
        elif kind == "insert":
            text = text[:start] + draw(st.sampled_from(TOKENS)) + text[start:]
        elif kind == "replace":
            text = text[:start] + draw(st.sampled_from(TOKENS)) + text[stop:]
        elif kind == "repeat":
            text = text[:stop] + text[start:stop] * draw(st.integers(1, 50)) + text[stop:]
        elif kind == "move":
            to = draw(st.integers(0, len(text)))
            text = text[:to] + text[start:stop] + text[to:]
        else:
            text = text[:start] + draw(st.characters()) + text[start + 1 :]
    return text


def read(text: str) -> None:
    begin = time.thread_time()
    try:
        graph = parse_graph(text)
    except ParseError as error:
        assert error.where and error.where[0].startswith("line ")
    else:
        verify(graph)
        assert graph_text(parse_graph(graph_text(graph))) == graph_text(graph)
    assert time.thread_time() - begin < MOST_UNITS * unit()


def runs(count: int) -> settings:
    return settings(max_examples=max(count, settings().max_examples), suppress_health_check=list(HealthCheck))


@runs(1500)
@given(damaged())
def test_damaged_texts(text: str) -> None:
    read(text)


@runs(300)
@given(st.lists(st.sampled_from(TOKENS), max_size=60))
def test_heaps_of_tokens(tokens: list[str]) -> None:
    read(" ".join(tokens))
    read('graph "g" { %0 = input() {name="x", type=f32[2,n]} ' + " ".join(tokens) + "}")


@runs(100)
@given(st.text())
def test_any_text(text: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(text)


@runs(100)
@given(st.binary(max_size=200), st.booleans())
def test_any_file(tmp_path_factory: pytest.TempPathFactory, data: bytes, begins_well: bool) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(b"RLXGRAPH\1\0\0\0" + data if begins_well else data)
    with pytest.raises(FormatError):
        load(path)
