"""Rows of language models as a table and as a section of a page; rows of several runs are kept in a file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.records import dataclass
from rlx.target.cpu import host, host_text
from rlx_bench.harness import Measured, Row, is_own
from rlx_bench.llm.measure import LOAD, MEMORY
from rlx_bench.llm.peers import PEERS
from rlx_bench.machine import kind, processor
from rlx_bench.report import commit, failures, markdown_table

Perplexities = dict[str, dict[str, float | str | None]]


@dataclass
class Results:
    """Rows and perplexities, and the commands that gave them."""

    rows: list[Row]
    perplexities: Perplexities
    commands: list[str]

    @staticmethod
    def read(path: Path | None) -> Results:
        """What a file has; nothing if there is none."""
        if path is None or not path.exists():
            return Results([], {}, [])
        kept = json.loads(path.read_text())
        rows = [Row(**{**r, "engines": [Measured(**m) for m in r["engines"]]}) for r in kept["rows"]]
        return Results(rows, kept["perplexities"], kept["commands"])

    def add(self, rows: Sequence[Row], perplexities: Perplexities, command: str) -> None:
        """Rows of another run, in place of those of the same model and threads."""
        new = {(r.workload, r.threads) for r in rows}
        self.rows = [r for r in self.rows if (r.workload, r.threads) not in new] + list(rows)
        self.perplexities = self.perplexities | perplexities
        said = f"{command}{commit()}"
        self.commands = [c for c in self.commands if c != said] + [said]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "host": host().name,
            "kind": kind(),
            "commands": self.commands,
            "rows": [dataclasses.asdict(r) for r in self.rows],
            "perplexities": self.perplexities,
        }


def cell(row: Row, m: Measured) -> str:
    """
    >>> cell(Row("m, prefill 128", 1, 0, 0, []), Measured("rlx", [0.005, 0.005]))
    '200 ±0%'
    >>> cell(Row("m, decode", 1, 0, 8e6, []), Measured("rlx", [0.005], rates=[2e9]))
    '200 ±0%, 80% of reading'
    >>> cell(Row("m, memory", 1, 0, 0, []), Measured("rlx", [2.0**28], error="far off"))
    '256 MiB, wrong'
    """
    if not m.times:
        return "fails"
    what = row.workload.rpartition(", ")[2]
    if what == LOAD:
        text = f"{m.median:.2f} s" + (f" (first {m.ready:.1f} s)" if m.ready else "")
    elif what == MEMORY:
        text = f"{m.median / (1 << 20):.0f} MiB"
    else:
        text = f"{1 / m.median:.0f} ±{m.spread:.0%}"
        if m.rates:
            share = (row.bytes or row.flops) / m.median / m.machine
            text += f", {share:.0%} of {'reading' if row.bytes else 'f32'}"
    return text + ", wrong" * bool(m.error)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: tokens a second (or seconds, or MiB) of each engine, and the ratio to the best peer."""
    names = list(dict.fromkeys(m.engine for r in rows for m in r.engines))
    own = [name for name in names if is_own(name)]
    cells = []
    for r in rows:
        by_name, ratios = {m.engine: m for m in r.engines}, [r.ratio(name) for name in own]
        told = [cell(r, by_name[name]) if name in by_name else "-" for name in names]
        told += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        cells.append([r.workload, str(r.threads), *told])
    return ["model", "threads", *names, *(f"{name} vs best" for name in own)], cells


def perplexity_table(found: Perplexities) -> tuple[list[str], list[list[str]]]:
    """Head and cells."""
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    cells = []
    for model, each in found.items():
        told = [each.get(name) for name in names]
        cells.append([model, *map(_number, told)])
    return ["weights", *names], cells


def _number(found: float | str | None) -> str:
    """
    >>> _number(13.25), _number(0.00123), _number(None), _number("no such file")
    ('13.2500', '1.2e-03', '-', 'fails')
    """
    if not isinstance(found, float):
        return "-" if found is None else "fails"
    return f"{found:.4f}" if found >= 1 else f"{found:.1e}"


def notes(rows: Sequence[Row]) -> list[str]:
    """What went wrong, and how each engine was run."""
    names = list(dict.fromkeys(m.engine for r in rows for m in r.engines))
    wrong = [re.sub(r"^(.*), [\w ]+, (\S+: )", r"\1, \2", line) for line in failures(rows)]
    settings = []
    for name in names:
        try:
            settings.append(f"{name} {PEERS[name].check()}: {PEERS[name].settings}")
        except Exception as error:
            settings.append(f"{name}: {error}")
    return [*dict.fromkeys(wrong), *settings]


def as_markdown(results: Results) -> str:
    """The section of a page."""
    lines = [
        f"Measured on {processor()} ({kind()}; RLX sees {host_text()}) by:",
        "",
        *(f"- {command}" for command in results.commands),
        "",
        "Each engine has its own process, stopped while others are timed. One thread is timed in interleaved",
        "rounds, several in blocks. Prefill and decode are tokens a second: the median, ± half the distance",
        "between the quartiles. Memory is the most that the process had. *rlx vs best* is above 1 where RLX",
        "is better than every peer. Logits are compared with RLX's: *wrong* is an engine that is further off",
        "than rounding explains; it is not counted. RLX's speed is also a share of what the machine gives",
        "next to it: of f32 multiply-adds for prompts (one for each weight of the layers), of plain reads",
        "for decode (of the weights that matmuls read).",
        "",
    ]
    if results.rows:
        lines += [
            *markdown_table(*table(results.rows)),
            "",
            *(f"- {note}" for note in notes(results.rows)),
            "",
        ]
    if results.perplexities:
        lines += [
            "Perplexity of the first 100,000 characters of `zoo:asv`, in windows of 512 tokens, and the mean",
            "KL divergence over four windows from what RLX computes with the same weights in f32:",
            "",
            *markdown_table(*perplexity_table(results.perplexities)),
            "",
        ]
    return "\n".join(lines)


def write_page(path: Path, section: str) -> None:
    """Put the section between its marks, or write a page of its own if there are none.

    >>> import tempfile
    >>> page = Path(tempfile.mkdtemp()) / "llm.md"
    >>> _ = page.write_text(f"before\\n{BEGIN}\\nold\\n{END}\\nafter\\n")
    >>> write_page(page, "new")
    >>> page.read_text().split()[0], "new" in page.read_text(), "old" in page.read_text()
    ('before', True, False)
    """
    old = (
        path.read_text(encoding="utf-8")
        if path.exists()
        else f"# Language models: RLX and others\n\n{BEGIN}\n{END}\n"
    )
    if BEGIN not in old or END not in old:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}; put them where the section belongs")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}", encoding="utf-8")


BEGIN, END = "<!-- bench/llm.py writes this -->", "<!-- end of what bench/llm.py writes -->"
