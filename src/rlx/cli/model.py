"""What commands that take a model share: the options, and opening it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.inputs import sizes_of
from rlx.cli.output import progress

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

MODEL_HELP = "A MODEL is an .onnx or .rlx file, a graph as text, or zoo:ID (see rlx zoo list)."


def compile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `rlx.compile` that commands offer."""
    options = (
        click.option("--device", help="Device to run on, cpu or opencl [cpu]; see rlx devices."),
        click.option("--threads", "-t", type=click.IntRange(min=1), help="Number of threads [all cores]."),
        click.option(
            "--precision", type=click.Choice(["f32", "bf16", "f16"]), help="Precision of matmuls [f32]."
        ),
        click.option("--target", help="CPU target to compile for [this machine]; see rlx devices."),
        click.option("--budget", metavar="BYTES", help="Memory limit for activations, like 64MiB [none]."),
        click.option(
            "--weight-budget", metavar="BYTES", help="Memory limit for weights, like 200MiB [none]."
        ),
        click.option("--assume", "-a", multiple=True, metavar="NAME=SIZE", help="Size to optimise for."),
        click.option("--cache/--no-cache", default=None, help="Use code that earlier runs compiled [yes]."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def open_model(
    model: str,
    device: str | None,
    threads: int | None,
    precision: str | None,
    target: str | None,
    budget: str | None,
    weight_budget: str | None,
    assume: tuple[str, ...],
    cache: bool | None,
    trust_native: bool = False,
) -> CompiledProgram:
    """The program of a model; options that were not given are left to `rlx.load`."""
    from rlx.session import load

    given = {"device": device, "threads": threads, "precision": precision, "target": target, "cache": cache}
    given |= {"budget": budget, "weight_budget": weight_budget}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if assume:
        options["assume"] = sizes_of(assume, "--assume")
    with progress(f"loading {model}"):
        return load(model, trust_native=trust_native, **options)
