"""rlx export: a model as a C library or a WebAssembly module, for places without Python."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.model import MODEL_HELP, compile_options, open_language_model, open_model
from rlx.cli.output import human_bytes, human_time, json_option, print_json, print_line, print_note, progress
from rlx.cli.pages import page_for
from rlx.export.names import identifier
from rlx.llm.chat_page import chat_page
from rlx.llm.source import is_language_model

# Sizes of a decoder, unless --bind says otherwise: tokens that are computed together, and logits of them.
_DECODER = {"new": (1, 128), "wanted": (0, 1)}
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
@click.option(
    "--page", is_flag=True, help="Write a web page that runs the WebAssembly module, and a server for it."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens of a conversation, of a language model [4096].",
)
@click.option("--embed", is_flag=True, help="Make the weights a part of the C library, not a file.")
@compile_options
@json_option
def export(
    model: str,
    c_folder: str | None,
    wasm_folder: str | None,
    bind: tuple[str, ...],
    name: str | None,
    page: bool,
    context: int | None,
    embed: bool,
    as_json: bool,
    target: str | None = None,
    **options: Any,
) -> None:
    """Write MODEL as a C library or a WebAssembly module that runs without Python.

    A C library is a header, a static archive and the weights, with an example and a CMake file. A WebAssembly
    module comes with an ES module that loads and runs it, and with a web page if you like. docs/export.md
    shows how to use them. MODEL may also be a language model in a GGUF file.
    """
    folder = c_folder or wasm_folder
    if folder is None or (c_folder and wasm_folder):
        raise click.UsageError("give --c DIR or --wasm DIR, one of them")
    if page and c_folder:
        raise click.UsageError("--page goes with --wasm DIR: it shows the module in a browser")
    kind = "c" if c_folder else "wasm"
    ranges = given = ranges_of(bind)
    start = time.perf_counter()
    called = name or identifier(Path(model.removeprefix("zoo:")).stem)
    if is_language_model(model):
        language = open_language_model(model, context=context, **options)
        program, shown = language.program, page and chat_page(language, called)
        ranges = {**_DECODER, **ranges}
    elif context is not None:
        raise click.UsageError(f"--context is for language models, which {model} is not")
    else:
        program, shown = open_model(model, **options), False
        if page:
            shown, fitting = page_for(model, program, print_note)
            ranges = {**fitting, **ranges}
    with progress(f"exporting {model}"):
        made = program.export(folder, kind, bind=ranges, name=called, target=target, embed=embed, page=shown)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({**asdict(made), "seconds": seconds})
        return
    for symbol, (low, high) in made.ranges.items():
        if symbol not in given:
            print_note(f"{symbol} ranges from {low} to {high}; --bind {symbol}=LOW..HIGH changes it")
    for file, size in made.files.items():
        print_line(f"{Path(made.folder) / file}: {human_bytes(size)}")
    room = f"{human_bytes(made.weights)} of weights and {human_bytes(made.memory)} of memory for one thread"
    print_line(f"{made.name} for {made.target}: {room}, in {human_time(seconds)}")
    if page:
        print_note(f"to see the page: python {Path(made.folder) / 'serve.py'}")


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
