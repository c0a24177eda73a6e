"""Writing prepared files; `rlx.llm.prepared.file` reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.errors import ConfigError, FormatError
from rlx.files import Json
from rlx.llm.batching.program import engine_tokens, key_of, program_of, tokens_alone
from rlx.llm.prepared.file import FACT, KEY, SETTINGS
from rlx.llm.prepared.settings import Settings, written
from rlx.runtime.store.save import Saved, write_programs

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

_ENGINE = "engine"


def save(
    model: LanguageModel, path: str | os.PathLike[str], targets: Sequence[str] = (), own: bool = True
) -> None:
    """Write a model: its programs with code for its own target (unless `own` is off) and for `targets`."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"a model is saved to a path, for example 'model.rlx', not to {path!r}")
    if "weight_budget" in model.program.lir.options:
        raise ConfigError(
            f"{model.source.path} was loaded with a limit of memory; load it without, to save it"
        )
    source, positions = model.source, model.positions
    settings = Settings(source.config, positions, source.pooling, source.tensors)
    about = {SETTINGS: written(settings), **source.parts()}

    def saved(key: Json) -> Saved:
        program = model.program if key == model.key else program_of(source, key, model.options)
        return Saved.of(program, {FACT: True, KEY: key}, own)

    first = saved(key_of(source, positions, tokens_alone(source.config, positions)))
    engine = saved(key_of(source, positions, engine_tokens(source.config, positions)))
    write_programs(path, first, {_ENGINE: engine}, about, targets)
