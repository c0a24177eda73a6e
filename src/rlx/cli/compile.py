"""rlx compile: a model to a .rlx file with plan, native code and weights, or to its plan as text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import counted, human_bytes, human_time, json_option, print_json, print_line, progress
from rlx.plan.files import write_text
from rlx.runtime.store.save import lir_for, save
from rlx.target.cpu import resolve, runs_here


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False),
    help="File to write; it ends in .rlx or .plan.",
)
@click.option(
    "--also", multiple=True, metavar="TARGET", help="Add code for another CPU target; may be repeated."
)
@compile_options
@json_option
def compile(model: str, output: str, also: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compile MODEL and save it as a .rlx file, which loads quickly.

    A .plan file holds the plan as text instead, to read and to compare with rlx diff.
    """
    ending = Path(output).suffix
    if ending not in (".rlx", ".plan"):
        raise click.UsageError(
            f"cannot write {output}: its name must end in .rlx (a program) or .plan (the plan as text)"
        )
    as_text = ending == ".plan"
    if as_text and also:
        raise click.UsageError(
            f"{output} holds the plan for one target; leave out --also, or write a .rlx file"
        )
    start = time.perf_counter()
    target: str | None = options.pop("target")
    # Code for another machine cannot be loaded here: it is compiled when the file is written.
    other = target if target is not None and not runs_here(resolve(target)) else None
    program = open_model(model, target=None if other else target, **options)
    with progress(f"writing {output}"):
        if as_text:
            write_text(lir_for(program, other) if other else program.lir, output)
        elif other:
            save(program, output, (other, *also), own=False)
        else:
            program.save(output, also)
    seconds, size = time.perf_counter() - start, Path(output).stat().st_size
    stats = program.stats
    if as_json:
        facts = {"file": output, "bytes": size, "seconds": seconds, "stats": stats, "notes": program.notes}
        print_json(facts)
        return
    targets = ", ".join(dict.fromkeys((other or program.lir.target, *also)))
    kernels = f"{counted(stats['kernels'], 'kernel')} ({stats['distinct_kernels']} distinct)"
    thunks = counted(len(stats["host_thunks"]), "host thunk")
    print_line(
        f"{output}: {human_bytes(size)}, {kernels} and {thunks}, "
        f"{'a plan' if as_text else 'code'} for {targets}, in {human_time(seconds)}"
    )
