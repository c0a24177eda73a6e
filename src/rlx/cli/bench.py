"""rlx bench: RLX beside the other engines that are installed, in one interleaved run."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx.cli.output import print_json, print_table, progress
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.bench import harness, starts


class _Interrupted(BaseException):
    """Ends what is being measured."""


@dataclass
class _Interruption:
    """The signal that ended the measuring, if one did."""

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
@click.option("--threads", "-t", multiple=True, type=click.IntRange(min=1), help="Thread counts [1 and 2].")
@click.option("--engine", "-e", multiple=True, help="Engines to run [rlx and the peers of each workload].")
@click.option(
    "--torch-compile", is_flag=True, help="torch.compile, weights frozen, wherever torch is a peer."
)
@click.option(
    "--rounds",
    default=7,
    show_default=True,
    type=click.IntRange(min=1),
    help="Interleaved rounds of three timings each.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the table as a Markdown page.")
@click.option("--chart", type=click.Path(path_type=Path), help="Write a PNG chart of the ratios.")
@click.option("--list", "list_", is_flag=True, help="Names of suites and workloads.")
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
    gemm:128,384,1536. `starts` measures cold and warm start, a new shape and memory. Every row is told as
    soon as it is measured; Ctrl-C or a signal to end leaves table and page with the rows that are done."""
    from rlx.bench import harness, report, starts
    from rlx.bench.workloads import MAKERS, SUITES

    if list_:
        print_table(("suite", "workloads"), [(name, " ".join(specs)) for name, specs in SUITES.items()])
        click.echo(f"workloads: {' '.join(MAKERS)}, and starts")
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
                click.echo(report.line(row), err=True)
        if "starts" in asked:
            begun = starts.measure(rounds, say)
    rows = harness.by_workload(rows)
    note = ""
    if interruption.signal is not None:
        note = f"Interrupted: {len(rows)} of {len(specs) * len(counts)} rows were measured."
    if page is not None:
        subject = asked[0] if len(asked) == 1 and asked[0] in SUITES else ""
        text = report.as_markdown(rows, shlex.join(["rlx", *sys.argv[1:]]), subject, note)
        page.write_text(text + starts.as_markdown(begun) if begun else text)
    if chart is not None and rows:
        report.chart(rows, chart)
    if as_json:
        print_json(report.as_json(rows) + starts.as_json(begun))
    else:
        _tell(rows, begun)
    if interruption.signal is not None:
        click.echo(note, err=True)
        click.get_current_context().exit(128 + interruption.signal)


def _tell(rows: list[harness.Row], begun: list[starts.Start]) -> None:
    """Tables for people."""
    from rlx.bench import known, report, starts

    if rows:
        print_table(*report.table(rows))
        click.echo(report.summary(rows))
        for line in report.settings(rows):
            click.echo(f"  {line}")
    if begun:
        print_table(*starts.table(begun))
    for line in known.slow_peers(rows):
        click.echo(f"suspicious: {line}", err=True)
