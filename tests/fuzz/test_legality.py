"""Fusion and composition share one set of rules: what fusion finds fitting also composes into a kernel.

Random groups of neighbouring ops are taken from random programs, whether fusion would try them or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rlx.api.lowering import lower, optimize
from rlx.cost.io import IoModel
from rlx.errors import RlxError
from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit, Misfit
from rlx.fuse.regions import Group, RegionMaker
from rlx.fuzz.programs.grammar import draw_program
from rlx.ir.graph import Graph
from rlx.kernel.nests import ComposeError
from rlx.rewrite.basic import materialize_operands, materialize_outputs
from rlx.rewrite.statistics import use_statistics

PROGRAMS = 25
GROUPS = 12  # per program


def graphs(seed: int) -> Iterator[tuple[int, Graph]]:
    """Graphs as fusion gets them, with the number of their program; some have symbolic sizes."""
    for number in range(PROGRAMS):
        program = draw_program(seed, number)
        symbolic = number % 3 == 0 and not program.asks_about_sizes
        try:
            graph = optimize(lower(program.graph(program.open_sizes() if symbolic else ())))
            yield number, materialize_outputs(materialize_operands(use_statistics(graph, [])))
        except RlxError:
            continue  # an input error that the program makes on purpose


def neighbours(facts: Facts, members: set[int]) -> list[int]:
    nodes = facts.graph.nodes
    near = {r for m in members for r in facts.readers.get(m, ())}
    near |= {a.root for m in members for a in facts.accesses(nodes[m])}
    kernels = {n.id for n in facts.kernels}
    return sorted(i for i in (near & kernels) - members if facts.kind(nodes[i]) != "own")


def draw_group(facts: Facts, rng: random.Random) -> list[int]:
    members = {rng.choice(facts.kernels).id}
    for _ in range(rng.randint(1, 6)):
        near = neighbours(facts, members)
        if not near:
            break
        members.add(rng.choice(near))
    return sorted(members)


@pytest.mark.parametrize("seed", [14, 1014, 2014, 4014])
def test_what_fits_also_composes(seed: int) -> None:
    rng = random.Random(seed)
    fitting = refused = 0
    for number, graph in graphs(seed):
        facts = Facts(graph, IoModel(graph))
        maker = RegionMaker(facts)
        for _ in range(GROUPS if len(facts.kernels) > 1 else 0):
            members = draw_group(facts, rng)
            if len(members) < 2 or any(facts.kind(graph.nodes[i]) == "own" for i in members):
                continue
            try:
                fit = Fit.of(facts, members)
                outputs = facts.outputs(members, fit.status)
                if fit.refuse_outputs(outputs) is not None:
                    refused += 1
                    continue
            except Misfit:
                refused += 1
                continue
            fitting += 1
            try:
                maker.region(Group(tuple(members)), outputs)
            except ComposeError as e:
                names = [graph.nodes[i].op.name for i in members]
                pytest.fail(
                    f"program {number} of seed {seed}: {names} fits, but does not compose: {e.message}"
                )
    assert fitting > 50 and refused > 10  # both answers are exercised
