"""All trained models of the zoo on real input, compared with ONNX Runtime: times, ratio, error, host thunks.

    python bench/zoo_speed.py [--threads 1 2] [--rounds 7] [model ...]

Engines take turns in one run, each in a process of its own. The error is relative to the largest value; lines
at the end are geometric means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlx_bench.harness import Row, Workers, run_row
from rlx_bench.workloads.trained import IDS

COLUMNS = {"threads": 8, "rlx us": 10, "±": 6, "ort us": 10, "± ": 6, "ratio": 7, "error": 10, "thunks": 8}


def thunks(id: str) -> int:
    """Kernels of a model that the host runs."""
    from rlx import zoo
    from rlx.api.compile import compile
    from rlx.frontend.onnx import from_onnx
    from rlx.zoo.minilm import load_graph

    path = zoo.fetch(id)
    graph = load_graph(path.parent) if id == "minilm" else from_onnx(path)
    return len(compile(graph).stats["host_thunks"])


def line(id: str, row: Row) -> str:
    own, peer = row.of("rlx"), row.of("onnxruntime")
    if own is None or peer is None:
        return f"{id:<16}{row.threads:>8}  " + "; ".join(
            f"{m.engine}: {m.error}" for m in row.engines if m.error
        )
    times = "".join(f"{m.median * 1e6:>10.1f}{m.spread:>6.0%}" for m in (own, peer))
    return f"{id:<16}{row.threads:>8}{times}{row.ratio() or 0:>7.2f}{peer.difference:>10.1e}{thunks(id):>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("models", nargs="*", default=["minilm", *IDS])
    asked = parser.parse_args()
    print(f"{'model':<16}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for threads in asked.threads:
        ratios = []
        with Workers(threads) as workers:
            for id in asked.models:
                row = run_row(f"zoo-{id}:", workers, None, asked.rounds, lambda text: None)
                print(line(id, row), flush=True)
                ratios.append(row.ratio())
        found = [r for r in ratios if r]
        if found:
            mean, median = statistics.geometric_mean(found), statistics.median(found)
            told = f"geometric mean {mean:.2f}, median {median:.2f}, least {min(found):.2f}"
            print(f"{len(found)} models at {threads} threads: {told}")


if __name__ == "__main__":
    main()
