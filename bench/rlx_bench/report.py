"""Rows as a table, as JSON, as a Markdown page and as a chart."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.target.cpu import host, host_text
from rlx_bench.chart import svg
from rlx_bench.engines import ENGINES
from rlx_bench.harness import Measured, Row
from rlx_bench.machine import kind, limited, processor

BEYOND = "†"
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
            line.append(_cell(by_name.get(name), r.copies))
        share = r.share()
        line.append(ratio_text(r))
        line.append("-" if share is None else f"{share:.0%}")
        cells.append(line)
    return ["workload", "threads", *names, "rlx vs best", "of machine"], cells


def ratio_text(row: Row) -> str:
    """How many times faster RLX is than the best peer; with a mark, than one that uses wider instructions.

    >>> wide = Measured("onnxruntime", [2.0], beyond="it cannot be limited")
    >>> ratio_text(Row("a", 1, 0.0, 0.0, [Measured("rlx", [1.0]), wide]))
    '2.00x†'
    """
    ratio, wide = row.ratio(), row.ratio_beyond()
    if ratio is None:
        return "-" if wide is None else f"{wide:.2f}x{BEYOND}"
    return f"{ratio:.2f}x"


def _cell(m: Measured | None, copies: int) -> str:
    if m is None:
        return "-"
    if m.error:
        return "wrong" if m.times else "fails"
    return f"{time_text(m.median / copies)} ±{m.spread:.0%}" + BEYOND * bool(m.beyond)


def failures(rows: Sequence[Row]) -> list[str]:
    """What each engine says where its cell has no time, once for all numbers of threads.

    >>> failures([Row("a", 1, 0.0, 0.0, [Measured("openvino", error="no such op")])])
    ['a, openvino: no such op']
    """
    found = (f"{r.workload}, {m.engine}: {m.error}" for r in rows for m in r.engines if m.error)
    return list(dict.fromkeys(found))


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
    """Geometric mean and worst of the ratios, by thread count; without rows that say nothing of others.

    >>> def row(name, ratio, **more):
    ...     return Row(name, 1, 0.0, 0.0, [Measured("rlx", [1.0]), Measured("numpy", [ratio])], **more)
    >>> print(summary([row("a", 1.0), row("b", 4.0), row("log-mel", 128.0, in_mean=False)]))
    1 thread: geometric mean 2.00x the best peer over 2 rows without log-mel (8.00x with), worst 1.00x (a)
    """
    lines = []
    for threads in sorted({r.threads for r in rows}):
        every = [(ratio, r) for r in rows if r.threads == threads and (ratio := r.ratio()) is not None]
        found = [(ratio, r.workload) for ratio, r in every if r.in_mean]
        if len(found) > 1:
            worst, name = min(found)
            plural = "s" if threads > 1 else ""
            mean, with_all = (_mean([ratio for ratio, _ in some]) for some in (found, every))
            left_out = f" without log-mel ({with_all:.2f}x with)" * (len(every) > len(found))
            lines.append(
                f"{threads} thread{plural}: geometric mean {mean:.2f}x the best peer over {len(found)} rows"
                f"{left_out}, worst {worst:.2f}x ({name})"
            )
    return "\n".join([*lines, *peaks(rows), *taken_cores(rows)])


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def peaks(rows: Sequence[Row]) -> list[str]:
    """What the machine gave in this run.

    >>> peaks([Row("a", 2, 0.0, 0.0, [], peaks={"flops": 2e11, "copy": 6e10})])[0].partition(", ")[2]
    '200 GFLOP/s of f32 multiply-adds, 60 GB/s of a copy on 2 threads'
    """
    found = {r.threads: r.peaks for r in rows if r.peaks}
    return [
        f"{8 * host().vector_bytes}-bit vectors, {given['flops'] / 1e9:.0f} GFLOP/s of f32 multiply-adds, "
        f"{given['copy'] / 1e9:.0f} GB/s of a copy on {threads} thread{'s' * (threads > 1)}"
        for threads, given in sorted(found.items())
    ]


def taken_cores(rows: Sequence[Row]) -> list[str]:
    """Rows in whose rounds the yardstick had less than the machine gives: others worked, nothing was fast.

    >>> rows = [Row("a", n, 1e9, 0.0, [], rate=rate) for n, rate in ((1, 1e11), (2, 1.1e11))]
    >>> taken_cores(rows)
    ['a on 2 threads: the machine gave 1.1 times what one gets, other programs used the rest: measure again']
    >>> taken_cores([Row("b", 1, 1e9, 0.0, [], rate=6e10, peaks={"flops": 1e11})])
    ['b on 1 thread: the machine gave 60 % of its peak, other programs used the rest: measure again']
    """
    alone = {r.workload: r.rate for r in rows if r.threads == 1 and r.flops and not r.bytes}
    lines = []
    for r in rows:
        gained = r.rate / alone[r.workload] if alone.get(r.workload) and r.rate else float(r.threads)
        peak = r.peaks.get("flops", 0.0)
        if gained < ENOUGH * r.threads:
            gave = f"{gained:.1f} times what one gets"
        elif peak and r.rate and not r.bytes and r.rate < ENOUGH * peak:
            gave = f"{100 * r.rate / peak:.0f} % of its peak"
        else:
            continue
        threads = f"{r.threads} thread{'s' * (r.threads > 1)}"
        lines.append(
            f"{r.workload} on {threads}: the machine gave {gave}, other programs used the rest: measure again"
        )
    return lines


def settings(rows: Sequence[Row]) -> list[str]:
    """What RLX saw as its host (other engines see the whole machine), how each engine was run and, where a
    search had a choice, what it took how often."""
    lines = [f"host: {host_text()}", f"kind of machine: {kind()}"]
    if limited():
        lines.append("peers: limited to AVX2 where a variable does that")
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
            "kind": kind(),
            "in_mean": r.in_mean,
            "peaks": dict(r.peaks),
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
                    "beyond_limit": m.beyond,
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
    failed = failures(rows)
    return "\n".join(
        [
            f"# Benchmarks: {subject}" if subject else "# Benchmarks",
            "",
            *([note, ""] if note else []),
            f"Made by `{command}` on {processor()} ({kind()}){commit()}.",
            "Medians. Each engine has its own process, stopped while others are timed; one thread is timed",
            "in interleaved rounds, several in blocks. Outputs are compared with the NumPy reference.",
            "± is half the distance between the quartiles. *rlx vs best* is the best peer's time divided by",
            "RLX's. *of machine* is RLX's share of the multiply-adds (or of the plain reads and copies) that",
            "the same cores did in the same rounds.",
            *([_LIMITED] if limited() else []),
            "",
            *lines,
            "",
            summary(rows),
            "",
            *(["Not measured:", "", *(f"- {line}" for line in failed), ""] if failed else []),
            "Settings: " + "; ".join(settings(rows)) + ".",
            "",
        ]
    )


_LIMITED = f"""
This machine has AVX-512 and stands for one with AVX2: RLX runs as `RLX_HOST=x86-64-v3`. Peers are limited
to AVX2 by variables where they can be. A time with {BEYOND} is of a peer that still uses wider instructions;
it does not count as the best peer. Where no peer is limited, *of machine* counts: it is the share of the
256-bit peak."""


def commit() -> str:
    """At which commit a clone of RLX is; nothing where there is no clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", measured at commit {done.stdout.strip()}"


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
    return svg("Time per run: shorter bars are faster", f"{processor()}; medians; RLX = 1", groups)
