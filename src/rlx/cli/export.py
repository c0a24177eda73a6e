"""rlx export: a model as a C library or a WebAssembly module, for places without Python."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import human_bytes, human_time, json_option, print_json, print_line, print_note, progress
from rlx.export.names import identifier

_FOLDER = click.Path(file_okay=False)


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option("--c", "c_folder", metavar="DIR", type=_FOLDER, help="Write a C library.")
@click.option("--wasm", "wasm_folder", metavar="DIR", type=_FOLDER, help="Write a WebAssembly module.")
@click.option(
    "--bind",
    multiple=True,
    metavar="NAME=LOW..HIGH",
    help="Smallest and largest size of a symbol, like seq=1..512; may be repeated. Without it, sizes range "
    "up to the assumed one, at least to 128.",
)
@click.option("--name", help="What all names begin with: an identifier of C. [from the name of the model]")
@click.option("--embed", is_flag=True, help="Make the weights a part of the C library, not a file.")
@compile_options
@json_option
def export(
    model: str,
    c_folder: str | None,
    wasm_folder: str | None,
    bind: tuple[str, ...],
    name: str | None,
    embed: bool,
    as_json: bool,
    target: str | None = None,
    **options: Any,
) -> None:
    """Write MODEL as a C library or a WebAssembly module that runs without Python.

    A C library is a header, a static archive and the weights, with an example and a CMake file. A WebAssembly
    module comes with an ES module that loads and runs it. docs/export.md shows how to use them.
    """
    folder = c_folder or wasm_folder
    if folder is None or (c_folder and wasm_folder):
        raise click.UsageError("give --c DIR or --wasm DIR, one of them")
    kind = "c" if c_folder else "wasm"
    ranges = ranges_of(bind)
    start = time.perf_counter()
    program = open_model(model, **options)
    called = name or identifier(Path(model.removeprefix("zoo:")).stem)
    with progress(f"exporting {model}"):
        made = program.export(folder, kind, bind=ranges, name=called, target=target, embed=embed)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({**asdict(made), "seconds": seconds})
        return
    for symbol, (low, high) in made.ranges.items():
        if symbol not in ranges:
            print_note(f"{symbol} ranges from {low} to {high}; --bind {symbol}=LOW..HIGH changes it")
    for file, size in made.files.items():
        print_line(f"{Path(made.folder) / file}: {human_bytes(size)}")
    room = f"{human_bytes(made.weights)} of weights and {human_bytes(made.memory)} of memory for one thread"
    print_line(f"{made.name} for {made.target}: {room}, in {human_time(seconds)}")


def ranges_of(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """`seq=1..512` texts as a dict; `seq=8` is a single size.

    >>> ranges_of(["seq=1..512", "batch=8"])
    {'seq': (1, 512), 'batch': (8, 8)}
    """
    out = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        low, dots, high = sizes.partition("..")
        if not (equals and name and low.isdecimal() and (high.isdecimal() or not dots)):
            raise click.UsageError(f"--bind takes NAME=LOW..HIGH, like seq=1..512, not {text!r}")
        out[name] = (int(low), int(high if dots else low))
    return out
