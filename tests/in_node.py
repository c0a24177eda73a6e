"""Scripts of pages in Node, and texts to try tokenizers with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

WEB = Path(__file__).parents[1] / "src" / "rlx" / "export" / "web"
"""The scripts of pages."""


def in_node(folder: Path, script: str) -> list[list[object]]:
    (folder / "check.mjs").write_text(script)
    done = subprocess.run(["node", "check.mjs"], cwd=folder, capture_output=True, text=True, check=True)
    found: list[list[object]] = json.loads(done.stdout)
    return found


def texts(count: int = 2000) -> list[str]:
    """Words, signs, scripts of all kinds, names of tokens, white space, and code points of every plane."""
    rng = np.random.default_rng(0)
    blocks = ((32, 127), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x1E00, 0x2100))
    blocks += ((0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF))
    blocks += ((0, 0xD800), (0xE000, 0x110000))
    parts = [*"the playing unaffable Zürich naïve İstanbul ΣΑΣ don't 3.14 ﬁne e\u0301 x\u0323\u0302".split()]
    parts += [
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[mask]",
        "[UNK",
        "\t",
        "\n",
        "\u3000",
        "\x00",
        "\ufffd",
        "a" * 101,
        "中文",
    ]
    made = []
    for _ in range(count):
        low, high = blocks[rng.integers(len(blocks))]
        drawn = [chr(c) for c in rng.integers(low, high, rng.integers(0, 30))]
        for _ in range(rng.integers(0, 6)):
            drawn.insert(
                int(rng.integers(0, len(drawn) + 1)),
                parts[rng.integers(len(parts))] + " " * int(rng.integers(0, 2)),
            )
        made.append("".join(drawn))
    return made
