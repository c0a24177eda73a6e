"""Write the README's table and chart of benchmarks from the page of one kind of machine: all are of one run.

python docs/make_readme_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KIND = "zen5-x86-64-v4-bf16-vnni"  # of the machine that the README shows
PAGE = ROOT / "docs" / "benchmarks" / f"{KIND}.md"
sys.path.insert(0, str(ROOT / "bench"))
from rlx_bench.chart import Group, svg  # noqa: E402 - from this clone

ENGINES = {"rlx": "RLX", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "torch"}
BEST = "rlx vs best"
# What the README shows: rows of the page with their threads, and how they are called there.
ROWS = {
    ("MiniLM b1 s16", 1): "MiniLM, batch 1, 16 tokens",
    ("MiniLM b1 s16", 2): "MiniLM, batch 1, 16 tokens",
    ("MiniLM b1 s128", 1): "MiniLM, batch 1, 128 tokens",
    ("MiniLM b1 s128", 2): "MiniLM, batch 1, 128 tokens",
    ("MiniLM b32 s128", 1): "MiniLM, batch 32, 128 tokens",
    ("MiniLM b32 s128", 2): "MiniLM, batch 32, 128 tokens",
    ("ResNet-50 b1", 1): "ResNet-50, batch 1",
    ("ResNet-50 b1", 2): "ResNet-50, batch 1",
    ("GPT-2 prefill 128", 1): "GPT-2, 128 tokens",
    ("GPT-2 decode after 128", 1): "GPT-2, one token after 128",
    ("LSTM 128x1x256x256", 1): "LSTM, 128 steps, 256 units",
    ("attention 12x128x32", 1): "attention, 12 heads, 128 x 32",
    ("gemm 128x384x1536", 1): "x @ w + b, 128 x 384 x 1536",
    ("softmax 4096x4096", 1): "softmax 4096 x 4096",
    ("train step MLP b128", 1): "training step, MLP, batch 128",
    ("magika", 2): "magika",
}
# What the chart shows: also the row of the page in which RLX is slowest against its peers.
CHART = {
    ("MiniLM b1 s16", 1): "MiniLM, batch 1, 16 tokens",
    ("MiniLM b1 s128", 1): "MiniLM, batch 1, 128 tokens",
    ("ResNet-50 b1", 1): "ResNet-50, batch 1",
    ("ResNet-50 b1", 2): "ResNet-50, batch 1",
    ("GPT-2 decode after 128", 1): "GPT-2, one token after 128",
    ("MLP b1 64-256-10 by run", 1): "small MLP by run()",
}


def page_rows(page: str) -> dict[tuple[str, int], dict[str, str]]:
    """The rows of the page's first table by workload and threads."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line
    ]
    names = next(cells for cells in lines if cells[0] == "workload")
    found = [dict(zip(names, cells, strict=True)) for cells in lines if len(cells) == len(names)]
    return {(row["workload"], int(row["threads"])): row for row in found if row["threads"].isdecimal()}


def table(page: str) -> str:
    """The README's table."""
    found = page_rows(page)
    lines = [f"| workload | threads | {' | '.join(ENGINES.values())} | vs best |", "|---|---|" + "---|" * 5]
    for (workload, threads), name in ROWS.items():
        row = found[workload, threads]
        cells = [name, str(threads), *(row[engine] for engine in ENGINES), row[BEST]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(cell: str) -> float:
    """
    >>> seconds("3.85 ms ±8%"), seconds("306.0 us ±3%")
    (0.00385, 0.000306)
    """
    number, unit, *_ = cell.split()
    return round(float(number) * {"ms": 1e-3, "us": 1e-6}[unit], 9)


def commit(page: str) -> str:
    """The commit that the page was measured at."""
    found = re.search(r"measured at commit (\w+)", page)
    assert found, f"{PAGE.name} does not say at which commit it was measured"
    return found[1]


def chart(page: str) -> str:
    """The README's chart."""
    found = page_rows(page)
    engines = {**ENGINES, "openvino-bf16": "OpenVINO"}
    groups: list[Group] = []
    for (workload, threads), name in CHART.items():
        row = found[workload, threads]
        times = {name: row[engine] for engine, name in engines.items() if row[engine] != "-"}
        label = f"{name}, {threads} thread{'s' * (threads > 1)}"
        groups.append((label, {name: (seconds(t), t.split(" ±")[0]) for name, t in times.items()}))
    machine = "Two cores of a Zen 5 server (AVX-512), f32, medians"
    note = f"{machine}; measured at commit {commit(page)}. RLX = 1."
    return svg("Time per run against peers: shorter bars are faster", note, groups)


def with_table(readme: str, page: str) -> str:
    """A README whose table of workloads is that of the page."""
    lines = readme.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("| workload |"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "".join(lines[:first]) + table(page) + "\n" + "".join(lines[last:])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    page = PAGE.read_text(encoding="utf-8")
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), page), encoding="utf-8")
    (ROOT / "docs" / "benchmarks.svg").write_text(chart(page), encoding="utf-8")
