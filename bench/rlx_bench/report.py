"""Rows as a table, as JSON, as a Markdown page and as a chart."""

from __future__ import annotations

import math
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.target.cpu import host, host_text
from rlx_bench.chart import svg
from rlx_bench.engines import ENGINES
from rlx_bench.harness import Row

ENOUGH = 0.75  # of as many times the rate as there are threads: below it, a core was taken


def time_text(seconds: float) -> str:
    """
    >>> time_text(0.0123), time_text(4.2e-5)
    ('12.30 ms', '42.0 us')
    """
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: median and spread of every engine, ratio to the best peer, share of the machine."""
    names = list(dict.fromkeys(m.engine for r in rows for m in r.engines))
    cells = []
    for r in rows:
        line = [r.workload, str(r.threads)]
        by_name = {m.engine: m for m in r.engines}
        for name in names:
            m = by_name.get(name)
            if m is None:
                line.append("-")
            else:
                line.append(m.error or f"{time_text(m.median / r.copies)} ±{m.spread:.0%}")
        ratio, share = r.ratio(), r.share()
        line.append("-" if ratio is None else f"{ratio:.2f}x")
        line.append("-" if share is None else f"{share:.0%}")
        cells.append(line)
    return ["workload", "threads", *names, "rlx vs best", "of machine"], cells


def line(row: Row) -> str:
    """A row in one line, for those who wait.

    >>> from rlx_bench.harness import Measured
    >>> line(Row("gemm 8x8x8", 1, 0.0, 0.0, [Measured("rlx", [1e-6]), Measured("numpy", [2e-6])]))
    'gemm 8x8x8, threads 1: rlx 1.0 us ±0%, numpy 2.0 us ±0%, rlx vs best 2.00x'
    """
    head, ((name, threads, *cells),) = table([row])
    told = [f"{column} {cell}" for column, cell in zip(head[2:], cells, strict=True) if cell != "-"]
    return f"{name}, threads {threads}: {', '.join(told)}"


def summary(rows: Sequence[Row]) -> str:
    """Geometric mean and worst of the ratios, by thread count."""
    lines = []
    for threads in sorted({r.threads for r in rows}):
        found = [
            (ratio, r.workload) for r in rows if r.threads == threads and (ratio := r.ratio()) is not None
        ]
        if len(found) > 1:
            mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
            worst, name = min(found)
            plural = "s" if threads > 1 else ""
            lines.append(
                f"{threads} thread{plural}: geometric mean {mean:.2f}x the best peer over {len(found)} rows, "
                f"worst {worst:.2f}x ({name})"
            )
    return "\n".join([*lines, *taken_cores(rows)])


def taken_cores(rows: Sequence[Row]) -> list[str]:
    """Rows in whose rounds the yardstick had fewer cores than threads: others worked, no engine could scale.

    >>> rows = [Row("a", n, 1e9, 0.0, [], rate=rate) for n, rate in ((1, 1e11), (2, 1.1e11))]
    >>> taken_cores(rows)
    ['a on 2 threads: the machine gave 1.1 times what one gets, other programs used the rest: measure again']
    """
    alone = {r.workload: r.rate for r in rows if r.threads == 1 and r.flops and not r.bytes}
    lines = []
    for r in rows:
        gained = r.rate / alone[r.workload] if alone.get(r.workload) and r.rate else float(r.threads)
        if gained < ENOUGH * r.threads:
            lines.append(
                f"{r.workload} on {r.threads} threads: the machine gave {gained:.1f} times what one gets, "
                "other programs used the rest: measure again"
            )
    return lines


def settings(rows: Sequence[Row]) -> list[str]:
    """What RLX saw as its host (other engines see the whole machine), how each engine was run and, where a
    search had a choice, what it took how often."""
    lines = [f"host: {host_text()}"]
    for name in dict.fromkeys(m.engine for r in rows for m in r.engines):
        taken = Counter(m.chosen for r in rows for m in r.engines if m.engine == name and m.chosen)
        counts = ", ".join(f"{what} in {count} rows" for what, count in taken.most_common())
        lines.append(f"{name}: {ENGINES[name].settings}" + (f" (faster: {counts})" if counts else ""))
    return lines


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for machines."""
    return [
        {
            "workload": r.workload,
            "threads": r.threads,
            "host": host().name,
            "ratio": r.ratio(),
            "share_of_machine": r.share(),
            "machine_rate": r.rate,
            "copies": r.copies,
            "engines": {
                m.engine: {
                    "median_s": m.median / r.copies if m.times else None,
                    "spread": m.spread if m.times else None,
                    "start_s": m.ready,
                    "settings": ENGINES[m.engine].settings,
                    "chosen": m.chosen,
                    "gflops": r.flops / m.median / 1e9 if m.times and r.flops else None,
                    "gbytes_per_s": r.bytes / m.median / 1e9 if m.times and r.bytes else None,
                    "difference": m.difference,
                    "error": m.error,
                }
                for m in r.engines
            },
        }
        for r in rows
    ]


def markdown_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    rows = [head, *cells]
    made = ["| " + " | ".join(row) + " |" for row in rows]
    return [made[0], "|" + "---|" * len(head), *made[1:]]


def as_markdown(rows: Sequence[Row], command: str, subject: str = "", note: str = "") -> str:
    """A page with the table, the command that made it and the machine; a note if it is not all."""
    lines = markdown_table(*table(rows))
    return "\n".join(
        [
            f"# Benchmarks: {subject}" if subject else "# Benchmarks",
            "",
            *([note, ""] if note else []),
            f"Made by `{command}` on {_processor()}{_commit()}.",
            "Medians of interleaved rounds. Each engine has its own process, stopped while others are timed.",
            "± is half the distance between the quartiles. *rlx vs best* is the best peer's time divided by",
            "RLX's. *of machine* is RLX's share of the multiply-adds (or of the plain reads and copies) that",
            "the same cores did in the same rounds.",
            "",
            *lines,
            "",
            summary(rows),
            "",
            "Settings: " + "; ".join(settings(rows)) + ".",
            "",
        ]
    )


def _commit() -> str:
    """At which commit a clone of RLX is; nothing where there is no clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", measured at commit {done.stdout.strip()}"


def _processor() -> str:
    try:
        names = [
            line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")
        ]
    except OSError:
        names = []
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()


def chart(rows: Sequence[Row]) -> str:
    """An SVG chart of the times of all engines, with the processor in its caption."""
    groups = [
        (
            f"{r.workload}, {r.threads} thread{'s' * (r.threads > 1)}",
            {
                m.engine: (m.median, time_text(m.median / r.copies))
                for m in sorted(r.engines, key=lambda m: m.engine != "rlx")
                if m.times
            },
        )
        for r in rows
        if r.ratio() is not None
    ]
    return svg("Time per run: shorter bars are faster", f"{_processor()}; medians; RLX = 1", groups)
