"""What innermost loops keep in memory for want of registers, as LLVM's comments in assembly tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.kernels import BodyKernels
from rlx.codegen.native import jit
from rlx.ir.graph import Graph
from rlx.plan.kernel_costs import kernel_name
from rlx.plan.lir import LirModule
from rlx.target.cpu import resolve

_FUNCTION = re.compile(r"^([\w.$]+):")
_BLOCK = re.compile(r"^(?:\.L(BB\d+_\d+):|# %bb\.\d+:)(.*)$")
_HEADER = re.compile(r"in Loop: Header=(BB\d+_\d+)")
_SPILL = re.compile(r"# (?:16|32|64)-byte (?:Folded )?Spill")


def in_innermost_loops(assembly: str) -> Counter[tuple[str, str]]:
    """Spills of vectors by function and loop.

    What a loop only reads, like a constant, is not counted: it is an operand in memory like any other.
    """
    counts: Counter[tuple[str, str]] = Counter()
    innermost: set[tuple[str, str]] = set()
    function = block = loop = ""
    for line in assembly.splitlines():
        if begins := _BLOCK.match(line):
            block, loop, line = begins[1] or "", "", begins[2]
        elif begins := _FUNCTION.match(line):
            function, block, loop = begins[1], "", ""
        if "Inner Loop Header" in line:
            loop = block
            innermost.add((function, loop))
        elif header := _HEADER.search(line):
            loop = header[1]
        if loop and _SPILL.search(line):
            counts[function, loop] += 1
    return Counter({place: n for place, n in counts.items() if place in innermost})


def spills_of(lir: LirModule) -> dict[str, int]:
    """The most spills of vectors in any innermost loop of each kernel, by its name and the function."""
    target = resolve(lir.target)
    made = build_kernels(lir, target)
    names = dict(_named(lir.mir, BodyKernels(made.kernels, made.inner)))
    most: dict[str, int] = {}
    for text in made.texts:
        for (function, _), count in in_innermost_loops(jit.assembly(text, target, comments=True)).items():
            symbol, _, part = function.partition(".")
            called = " ".join(filter(None, (names[symbol], part))) if symbol in names else function
            most[called] = max(count, most.get(called, 0))
    return most


def _named(graph: Graph, made: BodyKernels) -> Iterator[tuple[str, str]]:
    """Native functions of kernels, and what `explain` calls these."""
    for id, kernel in made.kernels.items():
        yield kernel.name, kernel_name(graph.nodes[id])
    for id, bodies in made.inner.items():
        for body, inside in zip(graph.nodes[id].bodies, bodies, strict=True):
            yield from _named(body, inside)
