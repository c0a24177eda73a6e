"""What is written about findings: a reproducer in Python, and a tally of what was run."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlx.fuzz.case import Finding
from rlx.fuzz.oracles import pins_for
from rlx.fuzz.programs.program import HEADER, Input, Program

SHOWN = 24  # elements of an array that is printed as numbers


@dataclass(frozen=True)
class Tally:
    """One line of the tally file."""

    seed: int
    programs: int
    host: str
    findings: int
    seconds: float
    poison: bool = False
    kind: str = "programs"


def commit() -> str:
    """The commit of the source tree, where there is one."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def write_tally(path: Path, tally: Tally) -> None:
    """Append one line of JSON."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(tally), "commit": commit(), "time": when}) + "\n")


def reproducer(program: Program, finding: Finding) -> str:
    """Python text that shows the fault."""
    p = program
    lines = [f"# {line}" for line in str(finding).splitlines()[:6]]
    header = (
        HEADER
        if "op(" in p.source().replace("ops.", "")
        else HEADER.replace(HEADER.splitlines()[-1] + "\n", "")
    )
    lines += [header, p.source()]
    for i, (x, array) in enumerate(zip(p.inputs, p.arrays(), strict=True)):
        lines.append(f"{x.name} = {array_text(p, i, x, array)}")
    return "\n".join([*lines, calling(p)]) + "\n"


def array_text(p: Program, number: int, x: Input, array: np.ndarray) -> str:
    """An expression for an array: numbers if they are few, else their generator."""
    kind = f"np.{array.dtype.name}" if array.dtype.kind in "fiubc" else f"rlx.ir.dtype.dtype({x.dtype!r}).np"
    if array.size and (array == array.flat[0]).all():
        return f"np.full({array.shape}, {array.flat[0].item()!r}, {kind})"
    if array.size <= SHOWN and np.isfinite(array.astype(np.complex128)).all():
        return f"np.array({array.tolist()}, {kind}).reshape({array.shape})"
    return (
        f"__import__('rlx.fuzz.programs.inputs', fromlist=['Values']).{x.values!r}"
        f".array({x.dtype!r}, {array.shape}, {(p.number, number)})"
    )


def options(p: Program) -> str:
    """Options of compile in the way that fails."""
    if p.ways[:1] == ("pins",):
        try:
            return f"threads=1, pins={pins_for(p.graph(), p.number)}"
        except Exception:  # planning is what fails
            return "threads=1"
    return {"threads": "threads=2", "poison": 'debug="poison"'}.get(p.ways[0] if p.ways else "", "threads=1")


def calling(p: Program) -> str:
    """How the function is called, in the way that fails."""
    way = p.ways[0] if p.ways else "static"
    names = ", ".join(x.name for x in p.inputs)
    call = f"{p.entry}({names})"
    if way == "jit":
        lines = [f"jitted = rlx.jit({p.entry})", f"print(jitted({names}))"]
        if p.others:
            for i, (x, array) in enumerate(zip(p.inputs, p.arrays(p.others), strict=True)):
                lines.append(f"{x.name} = {array_text(p, i, x, array)}")
            lines.append(f"print(jitted({names}))")
        return "\n".join([*lines, f"print({call})  # by the reference" if not p.transform else ""])
    opened = p.open_sizes() if way == "symbolic" else ()
    lines = ['graph = rlx.Graph("program")', "args = ["]
    weights = {x.name for x in p.inputs if x.weight}
    if any(x.weight and set(opened) & set(p.dims(x)) for x in p.inputs):
        weights = set()  # what is open in one is an input in all
    for x in p.inputs:
        shape = tuple(d if d in opened else n for d, n in zip(p.dims(x), p.shape(x), strict=True))
        made = (
            f"param({x.name!r}, {shape}, {x.dtype!r}, {x.name})"
            if x.name in weights
            else f"input({x.name!r}, {shape}, {x.dtype!r})"
        )
        lines.append(f"    graph.{made},")
    lines += ["]", "with graph.building():", f"    graph.set_outputs(list({p.entry}(*args)))"]
    feed = ", ".join(f"{x.name!r}: {x.name}" for x in p.inputs if x.name not in weights)
    lines.append(f"prog = rlx.compile(graph, cache=False, {options(p)})")
    if way == "threads":
        lines += ["from rlx.runtime.barriers import all_shared", "with all_shared():"]
        lines.append(f"    print(prog.run({{{feed}}}))")
    else:
        lines.append(f"print(prog.run({{{feed}}}))")
    if opened:
        for i, (x, array) in enumerate(zip(p.inputs, p.arrays(p.others), strict=True)):
            lines.append(f"{x.name} = {array_text(p, i, x, array)}")
        lines.append(f"print(prog.run({{{feed}}}))")
    lines.append("from rlx.reference.interpreter import evaluate")
    lines.append(f"print(evaluate(graph, {{{feed}}}))  # by the reference")
    return "\n".join(lines)
