"""What commands that take a model share: the options, and opening it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from rlx.api.options import FIELDS
from rlx.api.session import load
from rlx.cli.inputs import sizes_of
from rlx.cli.output import progress
from rlx.files import Json
from rlx.llm.model import LanguageModel
from rlx.llm.model import load as load_language_model

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

MODEL_HELP = "A MODEL is an .onnx or .rlx file, a graph as text, or zoo:ID (see rlx zoo list)."


def compile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `rlx.compile` that commands offer: those that have a text for the command line."""
    for name, known in reversed(list(FIELDS.items())):
        if known.metadata["flag"]:
            command = _flag(name, known.metadata)(command)
    return command


def _flag(name: str, about: Mapping[str, Any]) -> Callable[..., Any]:
    """An option of the command line; where it is not given, it is None."""
    flag, more = "--" + name.replace("_", "-"), Json(help=about["flag"], default=None)
    if name == "cache":
        flag = "--cache/--no-cache"
    elif name == "threads":
        more["type"] = click.IntRange(min=1)
    elif name == "assume":
        more["multiple"] = True
    elif "choices" in about:
        more["type"] = click.Choice(about["choices"])
    if "metavar" in about:
        more["metavar"] = about["metavar"]
    return click.option(flag, *([about["short"]] if "short" in about else []), **more)


def open_model(
    model: str, assume: tuple[str, ...], trust_native: bool = False, **given: Any
) -> CompiledProgram:
    """The program of a model; options that were not given are left to `rlx.load`."""
    with progress(f"loading {model}"):
        return load(model, trust_native=trust_native, **_chosen(assume, given))


def open_language_model(
    model: str, assume: tuple[str, ...], trust_native: bool = False, **given: object
) -> LanguageModel:
    """A language model; options that were not given are left to `rlx.llm.load`."""
    with progress(f"loading {model}") as say:
        return load_language_model(model, notify=say, **_chosen(assume, given))


def _chosen(assume: tuple[str, ...], given: Mapping[str, object]) -> Json:
    """The options that were given."""
    options: Json = {name: value for name, value in given.items() if value is not None}
    if assume:
        options["assume"] = sizes_of(assume, "--assume")
    return options
