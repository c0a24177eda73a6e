"""The fuzzer of files: what it mutates, and that mutants of fixed seeds are refused or work."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from rlx.fuzz import files
from rlx.fuzz.documents import (
    MAKERS,
    SPARSE,
    USERS,
    as_op,
    as_plan_text,
    as_sparse,
    graph_of,
    ops,
    with_other_words,
)
from rlx.fuzz.mutate import attribute_of, mutated
from rlx.ir.op import Op


@pytest.mark.parametrize("op", [op for op in ops() if op.attrs], ids=lambda op: op.name)
def test_every_attribute_of_every_op_is_mutated(op: Op) -> None:
    """Written or not: a turn through the attributes gives each another value."""
    text, chance = as_op(op, 0, weights=False).texts["text"], random.Random(op.name)
    for turn, name in enumerate(op.attrs):
        made = {attribute_of(op, text, turn, chance) for _ in range(8)} - {text}
        assert made, name
        for changed in made:
            assert re.search(rf"{re.escape(op.name)}\([^)]*\) {{.*\b{name}=", changed), changed


def test_all_ops_come_before_one_comes_again(tmp_path: Path) -> None:
    source = files.Source(7, tmp_path)
    first = [source.op(2 * i)[0].name for i in range(len(ops()))]
    assert sorted(first) == sorted(op.name for op in ops())
    per_op = 20_000 // files.PER_SOURCE // 2 // len(ops())
    assert per_op >= 2, "20,000 mutants go through all ops at least twice"


LINES = ("slot", "order", "view", "space", "input", "output", "alignment", "phase")


def test_every_field_of_a_plan_is_mutated(tmp_path: Path) -> None:
    """Offsets, sizes, lifetimes, aliases, the manifest: any line of a plan."""
    changed: set[str] = set()
    for number in range(48):
        graph = graph_of(3, number)
        if graph is None:
            continue
        text = as_plan_text(graph, tmp_path).texts["text"]
        before = set(text.splitlines())
        for seed in range(200):
            after = mutated(text, random.Random(seed)).splitlines()
            changed |= {line.split()[0] for line in after if line not in before and line.strip()}
    assert changed.issuperset(LINES), set(LINES) - changed


def test_starts_and_rows_are_mutated(tmp_path: Path) -> None:
    document = as_sparse(np.random.default_rng(0), tmp_path)
    made, number = document.kept
    before = made.kept[1][number]
    at: set[int] = set()
    for seed in range(300):
        after = with_other_words(document, np.random.default_rng(seed)).kept[1][number]
        at |= set(np.flatnonzero(before != after) // 8)
    starts = np.searchsorted(sorted(at), 60)
    assert starts > 10 and len(at) - starts > 10


@pytest.mark.parametrize("kind", [*MAKERS, SPARSE])
def test_sound_files_work(kind: str, tmp_path: Path) -> None:
    """What is refused before it is mutated would show nothing."""
    if kind in MAKERS:
        graph = next(g for g in (graph_of(3, n) for n in range(20)) if g is not None)
        document = MAKERS[kind](graph, tmp_path)
    else:
        document = as_sparse(np.random.default_rng(0), tmp_path)
        document = type(document)(document.kind, document.kept[0].texts, document.kept[0].kept)
    USERS[document.kind](document, tmp_path)


@pytest.mark.parametrize("seed", [1, 2])
def test_mutants(seed: int) -> None:
    """In a process of its own, with everything between guard pages."""
    found = [said for said in files.run(seed, 0, 280, "host") if "found" in said]
    assert not found, "\n".join(said["text"] for said in found)
