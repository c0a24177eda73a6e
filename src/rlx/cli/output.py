"""The only module that prints: lines and tables for people, JSON for machines, progress on a terminal.

Text is printed as it is: names of models, files and sentences may hold rich's markup or control characters,
which style nothing and cannot move the cursor. A test forbids printing in other modules.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.progress import heard

_UNLIMITED = 10_000  # columns
_GAP = 2  # columns between two columns of a table
_LAST = 24  # the last column of a table wraps; it is left at least this wide
_LEAST_LAST = 8  # unless names would be folded; then it may be as narrow as this
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def printable(text: object) -> str:
    """Text with control characters written as escapes; line breaks and tabs stay.

    >>> printable("red: \\x1b[31m [bold]")
    'red: \\\\x1b[31m [bold]'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def print_line(text: object = "", bold: bool = False) -> None:
    """Results as text, on stdout.

    >>> print_line("out[/b]")
    out[/b]
    """
    click.echo(click.style(printable(text), bold=True) if bold else printable(text))


def print_sentence(text: object) -> None:
    """Text on stdout, whose words wrap on a terminal; a pipe gets one line.

    >>> print_sentence("host: x86-64-v3")
    host: x86-64-v3
    """
    _stdout().print(Text(printable(text)))


def _stdout() -> Console:
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = _UNLIMITED
    return out


def print_note(text: object) -> None:
    """What is not a result, on stderr: notes, warnings and prompts."""
    click.echo(printable(text), err=True)


def print_piece(text: str) -> None:
    """Part of a line on stdout, shown at once."""
    click.echo(printable(text), nl=False)
    sys.stdout.flush()


def print_json(value: object) -> None:
    """One JSON document on stdout.

    >>> print_json({"id": "minilm"})
    {
      "id": "minilm"
    }
    """
    click.echo(json.dumps(value, indent=2))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """A plain table on stdout: columns named in `right` are flush right, and a pipe gets whole lines.

    On a terminal the last column wraps. If the table is still too wide, it loses its `optional` columns, the
    first named first; then texts are folded, but nothing is cut off.
    """
    out = _stdout()
    cells = {c: [printable(row[i]) for row in rows] for i, c in enumerate(columns)}
    widths = {c: max(cell_len(text) for text in (c, *texts)) for c, texts in cells.items()}
    if columns[-1] not in right:
        widths[columns[-1]] = min(widths[columns[-1]], _LAST)
    dropped = list(optional)
    while _width(widths) > out.width and dropped:
        del widths[dropped.pop(0)]
    over = _width(widths) - out.width
    if over > 0 and columns[-1] not in right:
        widths[columns[-1]] = max(widths[columns[-1]] - over, min(widths[columns[-1]], _LEAST_LAST))
    fits = _width(widths) <= out.width
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in widths:
        fixed = column in right or (fits and column != columns[-1])
        justify = "right" if column in right else "left"
        table.add_column(Text(column), justify=justify, no_wrap=fixed, overflow="fold")  # type: ignore[arg-type]
    for i in range(len(rows)):
        table.add_row(*(Text(cells[column][i]) for column in widths))
    out.print(table)


def _width(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


@contextmanager
def progress(first_line: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, silent if that is not a terminal. Its line shows the steps that RLX tells of, and
    what the caller says.

    >>> with progress("working") as say:
    ...     say("still working")
    """
    err = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not err.is_terminal:
        yield lambda line: None
        return
    with err.status(Text(printable(first_line))) as status:

        def say(line: str) -> None:
            status.update(Text(printable(line)))

        with heard(say):
            yield say


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


def counted(count: int, what: str) -> str:
    """
    >>> counted(1, "kernel"), counted(2, "kernel")
    ('1 kernel', '2 kernels')
    """
    return f"{count} {what}{'s' * (count != 1)}"
