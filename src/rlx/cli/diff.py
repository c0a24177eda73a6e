"""rlx diff: what differs between two programs, or between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx.cli.model import MODEL_HELP
from rlx.cli.output import print_json, progress

if TYPE_CHECKING:
    from rlx.ir.lir import LirModule

DIFFERENT = 3


@click.command(epilog=MODEL_HELP)
@click.argument("a", type=click.Path(exists=True, dir_okay=False))
@click.argument("b", type=click.Path(exists=True, dir_okay=False))
@click.option("--where", is_flag=True, help="Compare source locations too.")
@click.option("--plan", "plans", is_flag=True, help="Compare the plans of models, not their graphs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a diff.")
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, where: bool, plans: bool, as_json: bool) -> None:
    """Compare the programs in the files A and B; exits with 0 if they are the same, 3 if they differ.

    A node of B that stands for a node of A bears its number: an inserted node changes its own line and those
    of its readers, nothing else. Of plans (rlx compile -o FILE.plan) it says which kernels, how much traffic
    and memory, and which fusion decisions changed, and why.
    """
    with progress("comparing"):
        text = _plan_diff(a, b) if plans or _is_plan(a) or _is_plan(b) else _graph_diff(a, b, where)
    if as_json:
        print_json({"same": not text, "diff": text.splitlines()})
    elif text:
        click.echo(text)
    if text:
        ctx.exit(DIFFERENT)


def _is_plan(path: str) -> bool:
    from rlx.plan.files import is_plan

    with open(path, "rb") as file:
        return is_plan(file.read(16))


def _graph_diff(a: str, b: str, where: bool) -> str:
    from rlx.ir.diff import graph_diff
    from rlx.session import read_graph

    return graph_diff(read_graph(Path(a)), read_graph(Path(b)), locations=where)


def _plan_diff(a: str, b: str) -> str:
    from rlx.plan.diff import diff_plans

    return diff_plans(_plan(a), _plan(b))


def _plan(path: str) -> LirModule:
    """The plan in a file; a model is compiled for it."""
    from rlx.ir.lir import LirModule
    from rlx.session import load

    return LirModule.load(path) if _is_plan(path) else load(path).lir
