"""rlx bench: RLX beside the other engines that are installed, in one interleaved run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from rlx.cli.output import print_json, print_table, progress


@click.command()
@click.argument("workloads", nargs=-1)
@click.option("--threads", "-t", multiple=True, type=int, help="Thread counts [1 and 2].")
@click.option("--engine", "-e", multiple=True, help="Engines to run [rlx and the peers of each workload].")
@click.option(
    "--torch-compile", is_flag=True, help="torch.compile, weights frozen, wherever torch is a peer."
)
@click.option("--rounds", default=7, show_default=True, help="Interleaved rounds of three timings each.")
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
    gemm:128,384,1536. `starts` measures cold and warm start, a new shape and memory."""
    from rlx.bench import harness, known, report, starts
    from rlx.bench.workloads import MAKERS, SUITES

    if list_:
        print_table(("suite", "workloads"), [(name, " ".join(specs)) for name, specs in SUITES.items()])
        click.echo(f"workloads: {' '.join(MAKERS)}, and starts")
        return
    asked = workloads or ("quick",)
    specs = [s for w in asked if w != "starts" for s in SUITES.get(w, (w,))]
    with progress("measuring") as say:
        rows = harness.run(specs, threads or (1, 2), engine or None, rounds, say, torch_compile)
        begun = starts.measure(rounds, say) if "starts" in asked else []
    if page is not None:
        text = report.as_markdown(rows, shlex.join(["rlx", *sys.argv[1:]]))
        page.write_text(text + starts.as_markdown(begun) if begun else text)
    if chart is not None:
        report.chart(rows, chart)
    if as_json:
        print_json(report.as_json(rows) + starts.as_json(begun))
        return
    if rows:
        print_table(*report.table(rows))
        click.echo(report.summary(rows))
        for line in report.settings(rows):
            click.echo(f"  {line}")
    if begun:
        print_table(*starts.table(begun))
    for line in known.slow_peers(rows):
        click.echo(f"suspicious: {line}", err=True)
