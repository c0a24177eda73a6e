"""Smaller programs that show the same fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from rlx.fuzz.case import Finding
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.program import HEADER, Input, Program, Step
from rlx.ir.graph import Graph, Node

Check = Callable[[Program], Finding | None]
SIMPLE = Values(1, 1)


def shrink(
    program: Program, finding: Finding, check: Check, seconds: float = 60.0
) -> tuple[Program, Finding]:
    """The smallest program found in that time whose finding has the same signature."""
    end = time.monotonic() + seconds
    going = True
    while going:
        going = False
        for candidate in candidates(program):
            if time.monotonic() > end:
                return program, finding
            found = check(candidate)
            if found is not None and found.signature == finding.signature:
                program, finding, going = candidate, found, True
                break
    return program, finding


def candidates(p: Program) -> Iterator[Program]:
    """Programs with less in them, the boldest first."""
    if len(p.ways) > 1:
        yield from (replace(p, ways=(way,)) for way in p.ways)
    if p.transform:
        yield replace(p, transform="")
        simpler = {"grad of grad": "grad", "vmap of grad": "grad"}
        if p.transform in simpler:
            yield replace(p, transform=simpler[p.transform])
    if p.others:
        yield replace(p, others={})
        if len(p.others) > 1:
            yield from (replace(p, others={k: v}) for k, v in p.others.items())
    if len(p.outputs) > 1:
        yield from (pruned(replace(p, outputs=(name,))) for name in p.outputs)
    yield from (pruned(replace(p, outputs=s.results)) for s in p.steps if set(s.results) != set(p.outputs))
    yield from without_steps(p)
    yield from smaller_sizes(p)
    yield from plainer_inputs(p)


def types_of(p: Program) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every value that can be typed."""
    graph, space = Graph("types"), dict[str, object]()
    exec(HEADER, space)
    known: dict[str, Node] = {}
    plain = replace(p, transform="")
    with graph.building():
        for x in p.inputs:
            known[x.name] = graph.input(x.name, plain.shape(x), x.dtype)
        for step in p.steps:
            try:
                made = eval(step.text, space | known)
            except Exception:  # the fault itself, or what a candidate has broken
                break
            nodes = made if isinstance(made, (tuple, list)) else (made,)
            known |= {r: n for r, n in zip(step.results, nodes, strict=False) if isinstance(n, Node)}
    return {
        name: (str(n.dtype), tuple(int(d) for d in n.shape))
        for name, n in known.items()
        if all(isinstance(d, int) for d in n.shape)
    }


def pruned(p: Program) -> Program:
    """Without lines and inputs that no output needs; the input of derivatives stays."""
    needed = set(p.outputs)
    steps: list[Step] = []
    for step in reversed(p.steps):
        if needed & set(step.results):
            steps.append(step)
            needed |= step.names()
    by = p.inputs[p.wrt].name if p.inputs else ""
    keep = [x for x in p.inputs if x.name in needed or (p.transform and x.name == by)]
    wrt = next((i for i, x in enumerate(keep) if x.name == by), 0)
    return replace(p, steps=tuple(reversed(steps)), inputs=tuple(keep), wrt=wrt)


def without_steps(p: Program) -> Iterator[Program]:
    """Each value replaced by an input or by an operand of its type; then the last lines dropped."""
    types = types_of(p)
    for at in reversed(range(len(p.steps))):
        step = p.steps[at]
        for name in step.results:
            if name not in types:
                continue
            for operand in sorted(step.names()):
                if types.get(operand) == types[name]:
                    yield renamed(p, name, operand)
            dtype, shape = types[name]
            if name not in p.outputs:
                new = f"x{1 + max((int(x.name[1:]) for x in p.inputs), default=-1)}"
                given = Input(new, dtype, _named(p, shape), Values())
                yield renamed(replace(p, inputs=(*p.inputs, given)), name, new)
        if set(step.results) & set(p.outputs):
            for operand in sorted(step.names()):
                yield pruned(replace(p, outputs=(operand,)))


def _named(p: Program, shape: tuple[int, ...]) -> tuple[int | str, ...]:
    names = {n: name for name, n in p.sizes.items()}
    return tuple(names.get(n, n) for n in shape)


def renamed(p: Program, old: str, new: str) -> Program:
    steps = tuple(s.renamed(old, new) for s in p.steps if old not in s.results or len(s.results) > 1)
    outputs = tuple(new if name == old else name for name in p.outputs)
    return pruned(replace(p, steps=steps, outputs=outputs))


def smaller_sizes(p: Program) -> Iterator[Program]:
    for name, n in p.sizes.items():
        if any(name in p.dims(x) for x in p.inputs):
            for small in (1, 2, 3, 4, 5, 8, 9, 16):
                if small < n:
                    yield replace(p, sizes={**p.sizes, name: small})
    for i, x in enumerate(p.inputs):
        for at, d in enumerate(x.shape):
            if isinstance(d, str) and len(p.ways) == 1 and d not in p.others:
                yield with_input(p, i, replace(x, shape=(*x.shape[:at], p.sizes[d], *x.shape[at + 1 :])))
            elif isinstance(d, int) and x.values.given is None:
                for small in (1, 2, 3, 4):
                    if small < d:
                        yield with_input(p, i, replace(x, shape=(*x.shape[:at], small, *x.shape[at + 1 :])))


def plainer_inputs(p: Program) -> Iterator[Program]:
    for i, x in enumerate(p.inputs):
        if x.weight:
            yield with_input(p, i, replace(x, weight=False))
        if x.values.special or x.values.distinct:
            yield with_input(p, i, replace(x, values=Values(x.values.low, x.values.high)))
        if x.values.given is None and x.values != SIMPLE:
            yield with_input(p, i, replace(x, values=SIMPLE))
        if x.values not in (Values(), SIMPLE) and x.values.given is None:
            yield with_input(p, i, replace(x, values=Values()))


def with_input(p: Program, i: int, x: Input) -> Program:
    return replace(p, inputs=(*p.inputs[:i], x, *p.inputs[i + 1 :]))
