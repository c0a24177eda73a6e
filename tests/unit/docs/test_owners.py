"""Each fact has one owner module: what only the owner may contain is searched for everywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src" / "rlx"

OWNERS = {
    "layouts": ("kernel/layout.py", r"class Layout\b"),
    "file format": ("ir/text/container.py", r"Struct\(\"<8sIIQQ32s\"|Kind\(b\"RLX"),
    "legality": (
        "kernel/legality.py",
        r"cannot share a (kernel|loop nest)|such a kernel stores|is a kernel of its own\""
        r"|past its edge|at another (row|point) than its own"
        r"|nowhere to report an index|MOST_OUTPUTS\b.*=",
    ),
    "prices": ("target/prices.py", r"class Prices\b|\bPrices\(\d|\w+_(ps|ns|bw): \w+ = \d"),
    "machines": ("target/cpuid.py", r"__cpuid|/proc/cpuinfo"),
    "options": ("api/options.py", r"class Options\b"),
    "the word Call": ("frontend/onnx/call.py", r"class Call\b"),
    "the word Entry": ("llm/tensors.py", r"class Entry\b"),
    "the word Control": ("driver/worker.py", r"class Control\b"),
}


@pytest.mark.parametrize("fact", OWNERS)
def test_one_owner(fact: str) -> None:
    owner, pattern = OWNERS[fact]
    found = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if re.search(pattern, path.read_text(encoding="utf-8"))
    ]
    assert found == [owner], f"{fact} belongs into {owner}"
