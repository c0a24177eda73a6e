"""rlx bench: RLX and the other engines that are installed, measured in one interleaved run."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

from rlx.cli.output import json_option, print_json, print_line, print_note, print_table, progress
from rlx.config import HOST
from rlx.records import dataclass
from rlx_bench import harness, known, report, starts
from rlx_bench.machine import kind
from rlx_bench.workloads import MAKERS, SUITES


class _Interrupted(BaseException):
    """Ends the measurement."""


@dataclass
class _Interruption:
    """The signal that ended the measurement, if there was one."""

    signal: int | None = None


@contextmanager
def _until_interrupted() -> Iterator[_Interruption]:
    """Run the body to its end, or until the first signal to stop; a second one has its usual effect."""
    found = _Interruption()

    def stop(number: int, _: object) -> None:
        found.signal = number
        restore()
        raise _Interrupted

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    except _Interrupted:
        pass
    finally:
        restore()


@click.command()
@click.argument("workloads", nargs=-1)
@click.option(
    "--threads",
    "-t",
    multiple=True,
    type=click.IntRange(min=1),
    help="Thread count; may be repeated [1 and 2].",
)
@click.option(
    "--engine",
    "-e",
    multiple=True,
    help="Engine to run; may be repeated [rlx and the peers of each workload].",
)
@click.option(
    "--torch-compile", is_flag=True, help="Where torch is a peer, use torch.compile with frozen weights."
)
@click.option(
    "--rounds",
    default=7,
    show_default=True,
    type=click.IntRange(min=1),
    help="Interleaved rounds of three timings each.",
)
@json_option
@click.option(
    "--page",
    type=click.Path(path_type=Path),
    help="Write the table as a Markdown page; in a folder, as the page of this kind of machine.",
)
@click.option("--chart", type=click.Path(path_type=Path), help="Write an SVG chart of the times.")
@click.option("--list", "list_", is_flag=True, help="List the names of suites and workloads.")
def bench(
    workloads: tuple[str, ...],
    threads: tuple[int, ...],
    engine: tuple[str, ...],
    torch_compile: bool,
    rounds: int,
    as_json: bool,
    page: Path | None,
    chart: Path | None,
    list_: bool,
) -> None:
    """Measure WORKLOADS: suites (quick, gemm, elementwise, minilm, models ...) or single ones like
    gemm:128,384,1536. `starts` measures cold and warm start, a new shape and memory.

    Each row goes to stderr as soon as it is measured. After Ctrl-C or SIGTERM, the table and the page hold
    the rows that are done.
    """
    if list_:
        if as_json:
            print_json({"suites": {k: list(v) for k, v in SUITES.items()}, "workloads": [*MAKERS, "starts"]})
            return
        print_table(("suite", "workloads"), [(name, " ".join(specs)) for name, specs in SUITES.items()])
        print_line(f"workloads: {' '.join(MAKERS)}, and starts")
        return
    asked = workloads or ("quick",)
    specs = [s for w in asked if w != "starts" for s in SUITES.get(w, (w,))]
    counts = threads or (1, 2)
    rows: list[harness.Row] = []
    begun: list[starts.Start] = []
    with progress("measuring") as say, _until_interrupted() as interruption:
        with closing(harness.measure(specs, counts, engine or None, rounds, say, torch_compile)) as measured:
            for row in measured:
                rows.append(row)
                print_note(report.line(row))
        if "starts" in asked:
            begun = starts.measure(rounds, say)
    rows = harness.by_workload(rows)
    note = ""
    if interruption.signal is not None:
        note = f"Interrupted: {len(rows)} of {len(specs) * len(counts)} rows were measured."
    if page is not None:
        subject = asked[0] if len(asked) == 1 and asked[0] in SUITES else ""
        seen_as = [f"{HOST.name}={HOST.get()}"] if HOST.get() else []
        text = report.as_markdown(rows, shlex.join([*seen_as, "rlx", *sys.argv[1:]]), subject, note)
        path = page / f"{kind()}.md" if page.is_dir() else page
        path.write_text(text + starts.as_markdown(begun) if begun else text, encoding="utf-8")
    if chart is not None and rows:
        chart.write_text(report.chart(rows))
    if as_json:
        print_json(report.as_json(rows) + starts.as_json(begun))
    else:
        _tell(rows, begun)
    if interruption.signal is not None:
        print_note(note)
        click.get_current_context().exit(128 + interruption.signal)


def _tell(rows: list[harness.Row], begun: list[starts.Start]) -> None:
    """Tables for people."""
    if rows:
        columns, cells = report.table(rows)
        print_table(columns, cells, optional=("of machine", *reversed(columns[3:-2])))
        print_line(report.summary(rows))
        for line in report.settings(rows):
            print_line(f"  {line}")
    if begun:
        print_table(*starts.table(begun))
    for line in report.failures(rows):
        print_note(f"not measured: {line}")
    for line in known.slow_peers(rows):
        print_note(f"suspicious: {line}")
