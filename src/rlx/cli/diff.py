"""rlx diff: what differs between two programs."""

from __future__ import annotations

from pathlib import Path

import click

from rlx.cli.model import MODEL_HELP
from rlx.cli.output import print_json, progress

DIFFERENT = 3


@click.command(epilog=MODEL_HELP)
@click.argument("a", type=click.Path(exists=True, dir_okay=False))
@click.argument("b", type=click.Path(exists=True, dir_okay=False))
@click.option("--where", is_flag=True, help="Compare source locations too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a diff.")
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, where: bool, as_json: bool) -> None:
    """Compare the programs in the files A and B; exits with 0 if they are the same, 3 if they differ.

    A node of B that stands for a node of A bears its number: an inserted node changes its own line and those
    of its readers, nothing else.
    """
    from rlx.ir.diff import graph_diff
    from rlx.session import read_graph

    with progress("comparing"):
        text = graph_diff(read_graph(Path(a)), read_graph(Path(b)), locations=where)
    if as_json:
        print_json({"same": not text, "diff": text.splitlines()})
    elif text:
        click.echo(text)
    if text:
        ctx.exit(DIFFERENT)
