"""Which page `rlx export --page` writes for a model: by what the model takes, and by the files beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import zoo
from rlx.api.session import ZOO_PREFIX
from rlx.cli.demo import QUERIES, SENTENCES
from rlx.export import Page
from rlx.files import Json, file_boundary, read_plain
from rlx.ir.dim import Sym
from rlx.llm.hf import read_json

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

Notify = Callable[[str], None]
Ranges = dict[str, tuple[int, int]]


_RATE, _CHUNK, _CONTEXT = 16000, 512, 64  # of voice detection: samples of a second, of a step, and before it
_UPRIGHT: Json = {
    "image": {"height": 48, "width": 192, "mean": 0.5, "deviation": 0.5, "order": [2, 1, 0]},
    "labels": ["upright", "upside down"],
}
"""What the classifier of PP-OCR was trained with: lines of text, blue first."""


def page_for(model: str, program: CompiledProgram, note: Notify) -> tuple[Page, Ranges]:
    """The page that fits a model best, and the sizes that it runs the model at, unless the user gives others.

    `note` gets the reason if a special page almost fits but cannot be written.
    """
    in_zoo = model.startswith(ZOO_PREFIX)
    path = zoo.path(model.removeprefix(ZOO_PREFIX)) if in_zoo else Path(model)
    if model == f"{ZOO_PREFIX}ppocr-cls":
        line = [1, 3, _UPRIGHT["image"]["height"], _UPRIGHT["image"]["width"]]
        return _fixed("image", "Which way up is this text?", program, _UPRIGHT, {"x": line})
    inputs = {node.attrs["name"] for node in program.inputs}
    if {"input", "state"} <= inputs <= {"input", "state", "sr"} and "stateN" in program.output_names:
        settings = {"rate": _RATE, "chunk": _CHUNK, "context": _CONTEXT, "threshold": 0.5}
        shapes = {"input": [1, _CONTEXT + _CHUNK], "state": [2, 1, 128]}
        return _fixed("voice", "Is anyone speaking?", program, settings, shapes)
    found = _search_page(path, program, note)
    title = model.removeprefix(ZOO_PREFIX) if in_zoo else path.stem
    return found or Page(title=title), {}


def _fixed(
    kind: str, title: str, program: CompiledProgram, settings: Json, shapes: dict[str, list[int]]
) -> tuple[Page, Ranges]:
    """A page that runs a model at one size: `shapes` are those of its inputs."""
    sizes = {}
    for node in program.inputs:
        for d, size in zip(node.shape, shapes.get(node.attrs["name"], ()), strict=False):
            if not isinstance(d, int) and isinstance(d.atom, Sym):
                sizes[d.atom.name] = size
    return Page(kind, title, {**settings, "sizes": sizes}), {
        name: (size, size) for name, size in sizes.items()
    }


def _search_page(path: Path, program: CompiledProgram, note: Notify) -> Page | None:
    """Semantic search with an encoder of sentences, whose tokenizer is beside it."""
    inputs = {node.attrs["name"] for node in program.inputs}
    outputs = zip(program.output_names, program.outputs, strict=True)
    vectors = [name for name, node in outputs if len(node.shape) == 2]
    known = {"input_ids", "attention_mask", "token_type_ids"}
    tokenizer = path.with_name("tokenizer.json")
    if not {"input_ids"} <= inputs <= known or not vectors or not tokenizer.exists():
        return None
    with file_boundary(tokenizer, "tokenizer"):
        about = read_json(tokenizer)
        reason = unlike_bert(about)
    if reason is not None:
        note(f"{tokenizer}: {reason}, so the page takes numbers, not sentences")
        return None
    settings = {"output": vectors[0], "sentences": SENTENCES, "queries": QUERIES}
    return Page("search", "Semantic search", settings, {"tokenizer.json": read_plain(tokenizer)})


def unlike_bert(tokenizer: Json) -> str | None:
    """What a tokenizer.json has that the page's WordPiece does not know; None if it is all known.

    >>> unlike_bert({"model": {"type": "BPE"}})
    'its model is BPE, not WordPiece'
    """
    wanted = {
        "model": "WordPiece",
        "normalizer": "BertNormalizer",
        "pre_tokenizer": "BertPreTokenizer",
        "post_processor": "TemplateProcessing",
    }
    for part, kind in wanted.items():
        found = (tokenizer.get(part) or {}).get("type")
        if found != kind:
            return f"its {part} is {found}, not {kind}"
    return None
