"""Runs named stages one after the other; each can be verified, dumped, and replaced by
a graph from a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import numpy as np

from rlx import progress
from rlx.cost.decision import Decision
from rlx.errors import ConfigError, RlxError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify
from rlx.records import dataclass
from rlx.rewrite.rules import Firing

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Stage:
    """A named function from graph to graph."""

    name: str
    run: Callable[[Graph], Graph]
    level: Level = Level.MIR


@dataclass
class Trace:
    """How stages are watched, and what they report.

    `checks` verifies after every stage. `dump` is a folder that gets one file per stage, `override` gives the
    file whose graph replaces the result of a stage.
    """

    checks: bool = False
    dump: PathLike | None = None
    override: Mapping[str, PathLike] = field(default_factory=dict)
    firings: list[Firing] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)  # of stages before fusion
    stages: list[tuple[str, int]] = field(default_factory=list)  # name, live nodes after it
    seconds: list[tuple[str, float]] = field(default_factory=list)  # name, CPU time of the stage itself


def run_stages(graph: Graph, stages: Sequence[Stage], trace: Trace) -> Graph:
    """The graph after all stages.

    >>> g = Graph()
    >>> g.output("y", abs(g.input("x", (3,), "f32")))
    >>> trace = Trace(checks=True)
    >>> run_stages(g, [Stage("nothing", lambda graph: graph)], trace) is g, trace.stages
    (True, [('nothing', 2)])
    """
    known = [s.name for s in stages]
    for name in trace.override:
        if name not in known:
            raise ConfigError(f"there is no stage {name!r} to override; stages are: {', '.join(known)}")
    live: tuple[Graph, int] | None = None  # the last graph whose nodes were counted
    for number, stage in enumerate(stages):
        start = time.process_time()
        if stage.name in trace.override:
            graph = read_stage(trace.override[stage.name], graph, stage.level)
        else:
            graph = stage.run(graph)
        trace.seconds.append((stage.name, time.process_time() - start))
        progress.debug("stage %s of %r: %.1f ms", stage.name, graph.name, 1e3 * trace.seconds[-1][1])
        if trace.checks:
            try:
                verify(graph, stage.level)
            except VerifyError as e:
                raise VerifyError(f"after stage {stage.name!r}: {e.message}", e.where) from e
        if live is None or live[0] is not graph:
            live = graph, len(graph.live())
        trace.stages.append((stage.name, live[1]))
        if trace.dump is not None:
            write_stage(Path(trace.dump), f"{number:02}-{stage.name}", graph)
    return graph


def write_stage(folder: Path, name: str, graph: Graph) -> None:
    """The text of a graph, with arrays that are too large for it in a folder next to it."""
    blobs: dict[str, np.ndarray] = {}
    text = graph_text(graph, blobs=blobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        for digest, array in blobs.items():
            (folder / "blobs").mkdir(exist_ok=True)
            np.save(
                folder / "blobs" / f"{digest}.npy", array.view(np.uint8) if array.dtype.kind == "V" else array
            )
    except OSError as e:
        raise ConfigError(f"cannot dump stages to {folder}: {e.strerror or e}") from e


def read_stage(path: PathLike, before: Graph, level: Level) -> Graph:
    """A graph that `write_stage` wrote and a user changed; params keep the values they have."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        folder = file.parent / "blobs"
        blobs = {f.stem: np.load(f) for f in sorted(folder.glob("*.npy"))} if folder.is_dir() else {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {file} to override a stage: {e}") from e
    try:
        graph = verify(parse_graph(text, blobs), level)
    except RlxError as e:
        raise type(e)(f"{file}: {e.message}", e.where) from e
    graph.param_values = {k: v for k, v in before.param_values.items() if k in graph.params}
    graph.state_values = {k: v for k, v in before.state_values.items() if k in graph.state_inputs}
    return graph
