"""What the IR itself costs: building, verifying, printing, parsing, comparing and saving a large graph.

Run: python bench/compiler/graph_build.py. Every figure is the best of a few runs, in milliseconds. The last
lines are the time that `import rlx` adds to importing NumPy, in fresh processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlx
from rlx.ir.op import Level
from rlx.ir.text.diff import graph_diff, structurally_equal
from rlx.ir.text.files import load, save
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify
from rlx.transform.expand import expand_graph

IMPORT = """
import time, numpy
start = time.perf_counter()
import rlx
print((time.perf_counter() - start) * 1e3)
"""


def build(nodes: int, extra: int | None = None) -> rlx.Graph:
    """Layers of matmul, bias, activation, scale and residual over a symbolic batch, at least `nodes` nodes.

    `extra` is the layer that gets one node more.
    """
    g = rlx.Graph("layers")
    x = g.input("x", ("batch", 64), "f32")
    layer = 0
    while len(g) < nodes:
        w, b = g.param(f"w{layer}", (64, 64)), g.param(f"b{layer}", (64,))
        y = rlx.ops.gelu(x @ w + b)
        x = x + (rlx.ops.exp(y) if layer == extra else y) * 0.5
        layer += 1
    g.output("y", x)
    return g


def best(action: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Milliseconds of the fastest run, and what it gave."""
    least, result = float("inf"), None
    for _ in range(times):
        start = time.perf_counter()
        result = action()
        least = min(least, time.perf_counter() - start)
    return least * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    spent: dict[str, float] = {}

    def show(name: str, action: Callable[[], Any]) -> Any:
        spent[name], result = best(action, args.times)
        print(f"{name:<44} {spent[name]:9.1f}")
        return result

    print(f"{'milliseconds, best of ' + str(args.times):<44} {'':>9}")
    g = show(f"build {args.nodes:,} nodes", lambda: build(args.nodes))
    show("verify", lambda: verify(g, Level.HIR))
    text = show("print", lambda: graph_text(g))
    print(f"{'  the three together (wanted: under 2,000)':<44} {sum(spent.values()):9.1f}")
    again = show(f"parse {len(text):,} characters", lambda: parse_graph(text))
    show("structurally equal", lambda: structurally_equal(g, again))
    other = build(args.nodes, extra=10)
    show("diff after one inserted node", lambda: graph_diff(g, other))
    mir = show("expand to MIR", lambda: expand_graph(g))
    show(f"verify as MIR ({len(mir):,} nodes)", lambda: verify(mir, Level.MIR))
    with tempfile.TemporaryDirectory() as folder:
        show("save", lambda: save(g, Path(folder) / "g"))
        show("load", lambda: load(Path(folder) / "g"))

    # As installed: byte code is kept between runs (the first run here may write it).
    keep = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, env=keep, capture_output=True, text=True, check=True) for _ in range(10)]
    found = sorted(float(run.stdout) for run in runs)
    median = found[len(found) // 2]
    print(f"{'import rlx beyond numpy (wanted: under 60)':<44} {found[0]:9.1f}   (median {median:.1f})")


if __name__ == "__main__":
    main()
