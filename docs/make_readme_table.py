"""Write the README's table of benchmarks from the rows of docs/benchmarks.md, so that both are of one run.

python docs/make_readme_table.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def with_table(readme: str, page: str) -> str:
    """A README whose table of workloads is that of the page."""
    lines = readme.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("| workload |"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "".join(lines[:first]) + table(page) + "\n" + "".join(lines[last:])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), page), encoding="utf-8")
