"""rlx compile: a model into a .rlx file with plan, native code and weights, or into its plan as text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import human_bytes, human_time, print_json, progress


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option(
    "--output", "-o", required=True, type=click.Path(dir_okay=False), help="File to write: .rlx, or .plan."
)
@click.option("--also", multiple=True, metavar="TARGET", help="Add code for another target; may be repeated.")
@compile_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def compile(model: str, output: str, also: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compile MODEL and save it as a .rlx file, which loads in a moment.

    A file that ends in .plan gets the plan as text instead, to read and to compare with rlx diff.
    """
    from rlx.plan.files import write_text

    as_text = Path(output).suffix == ".plan"
    if as_text and also:
        raise click.UsageError(f"{output} is the plan for one target; --also is for .rlx files")
    start = time.perf_counter()
    program = open_model(model, **options)
    with progress(f"writing {output}"):
        if as_text:
            write_text(program.lir, output)
        else:
            program.save(output, targets=also)
    seconds, size = time.perf_counter() - start, Path(output).stat().st_size
    stats = program.stats
    if as_json:
        facts = {"file": output, "bytes": size, "seconds": seconds, "stats": stats, "notes": program.notes}
        print_json(facts)
        return
    targets = ", ".join(dict.fromkeys((program.lir.target, *also)))
    kernels = f"{stats['kernels']} kernels ({stats['distinct_kernels']} distinct)"
    thunks = len(stats["host_thunks"])
    click.echo(
        f"{output}: {human_bytes(size)}, {kernels} and {thunks} host thunk{'s' * (thunks != 1)}, "
        f"{'a plan' if as_text else 'code'} for {targets}, in {human_time(seconds)}"
    )
