"""rlx cache info | clear"""

from __future__ import annotations

import click

from rlx.cli.group import Group
from rlx.cli.output import counted, human_bytes, json_option, print_json, print_line, print_table
from rlx.files import Json
from rlx.runtime.store.cache import default_cache
from rlx.runtime.store.programs import ProgramStore


def _stores() -> Json:
    return {"code": default_cache(), "programs": ProgramStore()}


@click.group(cls=Group)
def cache() -> None:
    """Show or delete compiled code and programs of earlier runs."""


@cache.command(short_help="Show where the cache is and what is in it.")
@json_option
def info(as_json: bool) -> None:
    """Show where the cache is and what is in it (rlx zoo list shows fetched models)."""
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


@cache.command(short_help="Delete compiled code and programs.")
@json_option
def clear(as_json: bool) -> None:
    """Delete compiled code and programs; RLX compiles them again when needed. Fetched models stay."""
    gone = {name: store.clear() for name, store in _stores().items()}
    if as_json:
        print_json({"deleted": gone})
    else:
        print_line(f"deleted {counted(gone['code'], 'code file')} and {counted(gone['programs'], 'program')}")
