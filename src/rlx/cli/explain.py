"""rlx explain: what a program does, why it was fused so, where its memory goes."""

from __future__ import annotations

from typing import Any

import click

from rlx.cli.inputs import check_symbols, sizes_of
from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import print_json


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@compile_options
@click.option("--bind", "-b", multiple=True, metavar="NAME=SIZE", help="Sizes for times and memory.")
@click.option("--measure", is_flag=True, help="Build and time both sides of the largest fusion decisions.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def explain(model: str, bind: tuple[str, ...], measure: bool, as_json: bool, **options: Any) -> None:
    """Show the kernels of MODEL, the fusion decisions with their prices, and the memory plan."""
    sizes = sizes_of(bind)
    program = open_model(model, **options)
    check_symbols(sizes, program.lir.dynamic_symbols())
    binding = {**program.lir.planner.binding, **sizes}
    if not as_json:
        click.echo(program.explain(measure, binding))
        return
    kernels = [
        {"node": id, "kernel": program.describe(node), "type": str(node.type), "where": list(node.where)}
        for id in program.lir.plan.schedule
        for node in (program.graph.nodes[id],)
    ]
    print_json(
        {
            "name": program.graph.name,
            "target": program.lir.target,
            "stats": program.stats,
            "binding": binding,
            "memory": program.memory(binding),
            "kernels": kernels,
            "decisions": [d.to_json() for d in program.decisions],
            "notes": program.notes,
        }
    )
