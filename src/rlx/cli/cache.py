"""rlx cache info | clear"""

from __future__ import annotations

from typing import Any

import click

from rlx.cli.output import human_bytes, print_json, print_table


def _stores() -> dict[str, Any]:
    from rlx.runtime.cache import default_cache
    from rlx.runtime.programs import ProgramStore

    return {"code": default_cache(), "programs": ProgramStore()}


@click.group()
def cache() -> None:
    """Compiled code and programs of earlier runs: how much there is, and how to be rid of it."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def info(as_json: bool) -> None:
    """Show where the cache lies and what it holds (fetched models are listed by rlx zoo list)."""
    found = {name: store.info() for name, store in _stores().items()}
    if as_json:
        facts = {
            name: {"directory": str(i.directory), "entries": i.entries, "bytes": i.nbytes, "limit": i.limit}
            for name, i in found.items()
        }
        print_json(facts)
        return
    rows = [
        (name, str(i.entries), human_bytes(i.nbytes), human_bytes(i.limit), str(i.directory))
        for name, i in found.items()
    ]
    print_table(("what", "entries", "size", "limit", "folder"), rows, right=("entries", "size", "limit"))


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a line.")
def clear(as_json: bool) -> None:
    """Delete compiled code and programs; they are made again when needed. Fetched models stay."""
    gone = {name: store.clear() for name, store in _stores().items()}
    if as_json:
        print_json({"deleted": gone})
    else:
        click.echo(f"deleted {gone['code']} code files and {gone['programs']} programs")
