"""Where a model comes from: a GGUF file or a folder, with its decoder, tokenizer and chat template."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rlx import zoo
from rlx.errors import ConfigError, ModelImportError, UnsupportedError
from rlx.files import Json, file_boundary, read_plain
from rlx.llm import config, tokens
from rlx.llm.config import Config
from rlx.llm.encoders.pooling import MEAN, Pooling, gguf_pooling, longest_of, pooling_of
from rlx.llm.encoders.texts import no_text
from rlx.llm.gguf import GgufFile
from rlx.llm.hf import HfFolder, read_json
from rlx.llm.names import renamed
from rlx.llm.template import Template
from rlx.llm.tensors import Tensors
from rlx.llm.tokens import Tokenizer
from rlx.llm.unwoven import unwoven

_ZOO = "zoo:"
_POSITIONS = 4096  # tokens that caches hold, unless the model has fewer or the user wants others
ACTIVATIONS = ("f32", "i8")
AT_ONCE = 512
"""Tokens of a prompt that are computed together: more would only need more memory."""


class Source:
    """A model file, of which only the head was read. Tokenizer and template are read with their first use."""

    def __init__(
        self,
        path: Path,
        config: Config,
        tensors: Tensors,
        tokenizer: Callable[[], Tokenizer],
        template: Callable[[], str | None],
        others: tuple[Path, ...] = (),
        pooling: Pooling = MEAN,
        usual: int | None = None,
    ) -> None:
        self.path, self.config, self.tensors, self.others = path, config, tensors, others
        self.pooling, self.usual = pooling, _POSITIONS if usual is None else usual
        self._tokenizer, self._template = tokenizer, template

    def rounded(self, activations: str | None = None, kv: str | None = None) -> Source:
        """The same model, whose matmuls with weights of 4 and 8 bits take rows in f32, or rounded ("i8"), and
        whose pages have keys and values in f32, or rounded. None leaves that as it is.
        """
        old = self.config
        activations = old.activations if activations is None else activations
        kv = old.kv if kv is None else kv
        for name, value in (("activations", activations), ("kv", kv)):
            if value not in ACTIVATIONS:
                raise ConfigError(f"{name} is {value!r}; use {' or '.join(map(repr, ACTIVATIONS))}")
        if kv != "f32" and old.is_encoder:
            raise ConfigError(f"{self.path} is an encoder, which keeps no keys and values; leave out kv")
        made = copy.copy(self)
        made.config = replace(old, activations=activations, kv=kv)
        return made

    def positions(self, context: int | None) -> int:
        """How many tokens caches hold if a user wants this `context`."""
        most = self.config.context
        positions = min(most, self.usual) if context is None else context
        if not 1 <= positions <= most:
            raise ConfigError(f"context is {positions}; {self.path} takes between 1 and {most} tokens")
        return positions

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer()

    @cached_property
    def template(self) -> Template:
        if self.config.is_encoder:
            raise no_text(self.path)
        text = self._template()
        if text is None:
            raise UnsupportedError(
                f"{self.path} has no chat template; use generate() with a prompt of its own"
            )
        return Template(text)


def open_source(path: str | os.PathLike[str], notify: Callable[[str], None] | None = None) -> Source:
    """A model by the path of a GGUF file, of a folder with config.json, or as zoo:ID."""
    name = os.fspath(path)
    if name.startswith(_ZOO):
        return open_source(zoo.fetch(name.removeprefix(_ZOO), notify=notify))
    if os.path.isdir(name):
        return _of_folder(Path(name))
    if name.endswith(".safetensors") and os.path.exists(os.path.join(os.path.dirname(name), "config.json")):
        return _of_folder(Path(name).parent)
    with file_boundary(name, "model"), open(name, "rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ModelImportError(
            f"{name} is not a language model: give a GGUF file, or a folder with config.json and safetensors"
        )
    opened = GgufFile(name)
    found = config.from_gguf(opened)
    return Source(
        Path(name),
        *unwoven(found, opened.tensors),
        lambda: tokens.from_gguf(opened, encloses=found.is_encoder),
        lambda: opened.get("tokenizer.chat_template", str, "") or None,
        pooling=gguf_pooling(opened, found.architecture),
    )


def is_language_model(path: str) -> bool:
    """Whether a path looks like one that `open_source` takes; a model of the zoo is not fetched for it.

    >>> is_language_model("zoo:smollm2"), is_language_model("zoo:magika"), is_language_model("model.onnx")
    (True, False, False)
    """
    if path.startswith(_ZOO):
        return zoo.model(path.removeprefix(_ZOO)).kind == "language"
    if os.path.isdir(path):
        return os.path.exists(os.path.join(path, "config.json"))
    return path.endswith(".gguf")


def _of_folder(folder: Path) -> Source:
    opened = HfFolder(folder)
    settings, about_model = folder / "tokenizer_config.json", folder / "config.json"
    with file_boundary(about_model, "model config"):
        found = config.from_hf(str(folder), opened.config)

    def about() -> Json:
        return read_json(settings) if settings.exists() else {}

    return Source(
        about_model,
        found,
        renamed(opened.tensors),
        lambda: tokens.from_json(folder / "tokenizer.json", about(), encloses=found.is_encoder),
        lambda: _folder_template(folder, about()),
        opened.files,
        pooling_of(folder),
        longest_of(folder) if found.is_encoder else None,
    )


def _folder_template(folder: Path, about: Json) -> str | None:
    """The chat template: a file of its own, or part of the tokenizer's settings."""
    own = folder / "chat_template.jinja"
    if own.exists():
        with file_boundary(own, "chat template"):
            return read_plain(own).decode()
    found = about.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
