"""rlx bench: RLX beside the other engines that are installed, in one interleaved run."""

from __future__ import annotations

import click

from rlx.cli.output import print_json, print_table, progress


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


@click.command()
@click.argument("workloads", nargs=-1)
@click.option("--threads", "-t", multiple=True, type=int, help="Thread counts [1 and 2].")
@click.option("--engine", "-e", multiple=True, help="Engines to run [all that are installed].")
@click.option("--rounds", default=7, show_default=True, help="Interleaved rounds of three timings each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def bench(
    workloads: tuple[str, ...], threads: tuple[int, ...], engine: tuple[str, ...], rounds: int, as_json: bool
) -> None:
    """Measure WORKLOADS: suites (quick, gemm, elementwise, minilm) or single ones like gemm:128,384,1536."""
    from rlx.bench import harness
    from rlx.bench.workloads import SUITES

    specs = [s for w in (workloads or ("quick",)) for s in SUITES.get(w, (w,))]
    with progress("measuring") as say:
        rows = harness.run(specs, threads or (1, 2), engine or None, rounds, say)
    if as_json:
        print_json(harness.as_json(rows))
        return
    names = list(dict.fromkeys(m.engine for r in rows for m in r.engines))
    table = []
    for r in rows:
        cells = [r.workload, str(r.threads)]
        by_name = {m.engine: m for m in r.engines}
        for n in names:
            m = by_name.get(n)
            if m is None:
                cells.append("-")
            elif m.error:
                cells.append(m.error)
            else:
                cells.append(f"{_time(m.median)} ±{m.spread:.0%}")
        ratio = r.ratio()
        cells.append("-" if ratio is None else f"{ratio:.2f}x")
        table.append(cells)
    print_table(("workload", "threads", *names, "rlx vs best"), table)
