"""Where a model comes from: a GGUF file, a folder, a prepared file; its decoder, tokenizer and template."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import zoo
from rlx.api.session import known, stored_program
from rlx.errors import ConfigError, ModelImportError, UnsupportedError
from rlx.files import Json, file_boundary, read_plain
from rlx.ir.text.container import PROGRAM
from rlx.llm import config, tokens
from rlx.llm.config import ACTIVATIONS, Config
from rlx.llm.encoders.pooling import MEAN, Pooling, gguf_pooling, longest_of, pooling_of
from rlx.llm.encoders.texts import no_text
from rlx.llm.gguf import GgufFile
from rlx.llm.hf import HfFolder, json_object, read_json
from rlx.llm.names import renamed
from rlx.llm.prepared.file import START, PreparedFile, is_prepared
from rlx.llm.template import Template
from rlx.llm.tensors import Tensors
from rlx.llm.tokens import Tokenizer
from rlx.llm.unwoven import unwoven

if TYPE_CHECKING:
    from rlx.api.options import LoadOptions
    from rlx.ir.graph import Graph
    from rlx.runtime.program import CompiledProgram

_ZOO = "zoo:"
_POSITIONS = 4096  # tokens that caches hold, unless the model has fewer or the user wants others
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"  # of folders
_GGUF_TOKENIZER, _TEMPLATE = "tokenizer.gguf", "template"  # in prepared files, beside those
_TOKENIZERS = (_TOKENIZER, _TOKENIZER_CONFIG, _GGUF_TOKENIZER)
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
        texts: Callable[[], dict[str, bytes]] = dict,
        prepared: PreparedFile | None = None,
    ) -> None:
        self.path, self.config, self.tensors, self.others = path, config, tensors, others
        self.pooling, self.usual = pooling, _POSITIONS if usual is None else usual
        self._tokenizer, self._template, self._texts = tokenizer, template, texts
        self.prepared = prepared

    def rounded(self, activations: str | None = None, kv: str | None = None) -> Source:
        """The same model, whose matmuls with weights of 4 to 8 bits take rows in f32, or rounded ("i8"), and
        whose pages have keys and values in f32, or rounded. None leaves that as it is.
        """
        old = self.config
        activations = old.activations if activations is None else activations
        kv = old.kv if kv is None else kv
        for name, value in (("activations", activations), ("kv", kv)):
            if value not in ACTIVATIONS:
                raise ConfigError(f"{name} is {value!r}; use {' or '.join(map(repr, ACTIVATIONS))}")
            if self.prepared is not None and value != getattr(old, name):
                raise self._fixed(name, getattr(old, name), value)
        if kv != "f32" and old.is_encoder:
            raise ConfigError(f"{self.path} is an encoder, which keeps no keys and values; leave out kv")
        made = copy.copy(self)
        made.config = replace(old, activations=activations, kv=kv)
        return made

    def positions(self, context: int | None) -> int:
        """How many tokens caches hold if a user wants this `context`."""
        most = self.config.context
        positions = min(most, self.usual) if context is None else context
        if self.prepared is not None and positions != self.usual:
            raise self._fixed("context", self.usual, positions)
        if not 1 <= positions <= most:
            raise ConfigError(f"context is {positions}; {self.path} takes between 1 and {most} tokens")
        return positions

    def _fixed(self, name: str, there: object, wanted: object) -> ConfigError:
        """The error for what was decided when a file was prepared."""
        return ConfigError(
            f"{self.path} was prepared with {name} {there}, not {wanted}; leave {name} out, or prepare "
            f"another file: rlx compile MODEL --{name} {wanted} -o FILE"
        )

    def program(self, key: Json, options: LoadOptions, build: Callable[[], Graph]) -> CompiledProgram:
        """A program of this model, from a store or compiled; `key` says which, `build` makes its graph."""
        if self.prepared is not None:
            program = self.prepared.program(key, options, build)
        else:
            others = [known(other) for other in self.others]  # before they are read
            program = stored_program(known(self.path), {**options}, key, lambda: (build(), others))
        self.tensors.check()
        return program

    def parts(self) -> dict[str, bytes]:
        """Texts of the model by name: its tokenizer and its chat template, as a prepared file has them."""
        found = self._texts()
        template = None if self.config.is_encoder else self._template()
        if template is not None:
            found[_TEMPLATE] = template.encode("utf-8", "surrogateescape")
        return found

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
        start = file.read(START)
    if start == PROGRAM.mark:
        return _of_prepared(Path(name))
    if not start.startswith(b"GGUF"):
        raise ModelImportError(
            f"{name} is not a language model: give a GGUF file, or a folder with config.json and "
            "safetensors, or what rlx compile made of one"
        )
    opened = GgufFile(name)
    found = config.from_gguf(opened)
    return Source(
        Path(name),
        *unwoven(found, opened.tensors),
        lambda: tokens.from_gguf(opened, encloses=found.is_encoder),
        lambda: opened.get("tokenizer.chat_template", str, "") or None,
        pooling=gguf_pooling(opened, found.architecture),
        texts=lambda: {_GGUF_TOKENIZER: opened.without_tensors()},
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
    return path.endswith(".gguf") or (path.endswith(".rlx") and is_prepared(path))


def _of_prepared(path: Path) -> Source:
    file = PreparedFile(path)
    settings, is_encoder = file.settings, file.settings.config.is_encoder

    def tokenizer() -> Tokenizer:
        if _GGUF_TOKENIZER in file.names:
            opened = GgufFile.of_bytes(str(path), file.part(_GGUF_TOKENIZER))
            return tokens.from_gguf(opened, encloses=is_encoder)
        about = json_object(path, file.part(_TOKENIZER_CONFIG)) if _TOKENIZER_CONFIG in file.names else {}
        return tokens.from_json_text(str(path), file.part(_TOKENIZER), about, encloses=is_encoder)

    def template() -> str | None:
        if _TEMPLATE not in file.names:
            return None
        with file_boundary(path, "chat template"):
            return file.part(_TEMPLATE).decode("utf-8", "surrogateescape")

    return Source(
        path,
        settings.config,
        settings.tensors,
        tokenizer,
        template,
        pooling=settings.pooling,
        usual=settings.positions,
        texts=lambda: {name: file.part(name) for name in _TOKENIZERS if name in file.names},
        prepared=file,
    )


def _of_folder(folder: Path) -> Source:
    opened = HfFolder(folder)
    settings, about_model = folder / _TOKENIZER_CONFIG, folder / "config.json"
    with file_boundary(about_model, "model config"):
        found = config.from_hf(str(folder), opened.config)

    def about() -> Json:
        return read_json(settings) if settings.exists() else {}

    def texts() -> dict[str, bytes]:
        with file_boundary(folder, "folder of a model"):
            return {f.name: read_plain(f) for f in (folder / _TOKENIZER, settings) if f.exists()}

    return Source(
        about_model,
        found,
        renamed(opened.tensors),
        lambda: tokens.from_json(folder / _TOKENIZER, about(), encloses=found.is_encoder),
        lambda: _folder_template(folder, about()),
        opened.files,
        pooling_of(folder),
        longest_of(folder) if found.is_encoder else None,
        texts,
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
