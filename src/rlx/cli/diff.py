"""rlx diff: what differs between two models, or between two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rlx.api.session import load, read_graph
from rlx.cli.model import MODEL_HELP
from rlx.cli.output import json_option, print_json, print_line, progress
from rlx.files import open_plain
from rlx.ir.text.diff import graph_diff
from rlx.plan.diff import diff_plans
from rlx.plan.files import is_plan
from rlx.plan.lir import LirModule

if TYPE_CHECKING:
    from rlx.plan.lir import LirModule

DIFFERENT = 3


@click.command(epilog=f"{MODEL_HELP} Here it can also be a .plan file.")
@click.argument("a", metavar="MODEL_A")
@click.argument("b", metavar="MODEL_B")
@click.option("--where", is_flag=True, help="Compare source locations too.")
@click.option(
    "--plan", "plans", is_flag=True, help="Compile both models and compare their plans, not their graphs."
)
@json_option
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, where: bool, plans: bool, as_json: bool) -> None:
    """Compare two models or two plans; exits with 0 if they are the same and with 3 if they differ.

    Equal nodes have equal numbers: a new node changes its own line and the lines of its readers, nothing
    else. For plans (rlx compile -o FILE.plan) the diff shows which kernels, how much traffic and memory, and
    which fusion decisions changed, and why.
    """
    of_plans = plans or _is_plan(a) or _is_plan(b)
    with progress("comparing"):
        text = _plan_diff(a, b) if of_plans else _graph_diff(a, b, where)
    if as_json:
        print_json({"same": not text, "diff": text.splitlines()})
    else:
        print_line(text or f"no difference: {a} and {b} have the same {'plan' if of_plans else 'graph'}")
    if text:
        ctx.exit(DIFFERENT)


def _is_plan(path: str) -> bool:
    try:
        with open_plain(path) as file:
            return is_plan(file.read(16))
    except OSError:  # zoo:ID, or nothing that can be read: what opens models says so
        return False


def _graph_diff(a: str, b: str, where: bool) -> str:
    return graph_diff(read_graph(a), read_graph(b), locations=where)


def _plan_diff(a: str, b: str) -> str:
    return diff_plans(_plan(a), _plan(b))


def _plan(path: str) -> LirModule:
    """The plan in a file; a model is compiled for it."""
    return LirModule.load(path) if _is_plan(path) else load(path).lir
