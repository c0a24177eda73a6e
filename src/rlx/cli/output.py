"""What every command prints with: tables for people, JSON for machines, progress only on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_UNLIMITED = 10_000  # columns


def console() -> Console:
    """A console on stdout; made anew so that it follows redirections."""
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout.

    >>> print_json({"id": "minilm"})
    {
      "id": "minilm"
    }
    """
    click.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A plain table: columns named in `right` are flush right, the last wraps; a pipe gets whole lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", no_wrap=column != columns[-1]
        )
    for row in rows:
        table.add_row(*row)
    out = console()
    if not out.is_terminal:
        out.width = _UNLIMITED
    out.print(table)


@contextmanager
def progress(first_line: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with a line that the caller may change; silent when stderr is no terminal.

    >>> with progress("working") as say:
    ...     say("still working")
    """
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        yield lambda line: None
        return
    with err.status(first_line) as status:
        yield lambda line: status.update(line)


def human_bytes(size: int) -> str:
    """
    >>> human_bytes(512), human_bytes(91_566_933)
    ('512 B', '87.3 MiB')
    """
    if size < 1024:
        return f"{size} B"
    for unit, scale in (("KiB", 2**10), ("MiB", 2**20)):
        if size < 1024 * scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 2**30:.1f} GiB"


def human_time(seconds: float) -> str:
    """
    >>> human_time(2.5), human_time(0.0123), human_time(45e-6)
    ('2.50 s', '12.3 ms', '45 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
