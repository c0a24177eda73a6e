"""Reading prepared files: `.rlx` files with all that a language model is.

A prepared file is a program of RLX with others beside it, and parts of its own: settings, tokenizer, chat
template. What `rlx.runtime.store.artifact` says of trust holds: code that this user did not sign is not run.
Programs are then built anew from the settings, and so are those that the file does not have; values of their
params come from the file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlx.api.options import LoadOptions
from rlx.api.session import compiled_elsewhere, opened_program, stored_program
from rlx.errors import ModelImportError
from rlx.files import Json, file_boundary, open_plain
from rlx.ir.text.container import PROGRAM
from rlx.llm.prepared.settings import Settings, read
from rlx.runtime.store.artifact import Artifact
from rlx.runtime.store.origin import ABOUT

if TYPE_CHECKING:
    from rlx.ir.attr import AttrValue
    from rlx.ir.graph import Graph
    from rlx.runtime.program import CompiledProgram
    from rlx.runtime.store.programs import Known

FACT = "language_model"
"""The fact of a program by which its file is one of these."""
KEY = "program"
"""The fact that tells the programs of a file apart."""
SETTINGS = "settings"
START = len(PROGRAM.mark)


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a prepared language model; FormatError for a damaged program.

    >>> is_prepared("/no/such/file.rlx")
    False
    """
    if not os.path.isfile(path):
        return False
    with file_boundary(path), open_plain(path) as file:
        if file.read(START) != PROGRAM.mark:
            return False
    return FACT in Artifact(path).facts


class PreparedFile:
    """An open prepared file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Artifact(path)
        if FACT not in self._file.facts:
            raise ModelImportError(
                f"{os.fspath(path)} is a compiled program, but no language model; run it with rlx run or "
                "rlx.load, or prepare a language model: rlx compile MODEL -o FILE"
            )
        self.settings: Settings = read(self._file.container.path, self.part(SETTINGS))
        self.settings.tensors.params = lambda: self._file.params

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the parts that are not code."""
        parts = self._file.container.part_names
        return [name.removeprefix(ABOUT) for name in parts if name.startswith(ABOUT)]

    def part(self, name: str) -> bytes:
        """A part that is not code."""
        return self._file.container.part(ABOUT + name)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return int(self._file.container.header["array_bytes"])

    def program(self, key: Json, options: LoadOptions, build: Callable[[], Graph]) -> CompiledProgram:
        """A program of the model; `key` says which, `build` makes its graph."""
        every = (self._file, *self._file.inner.values())

        def compiled(model: Known, given: Mapping[str, AttrValue]) -> CompiledProgram:
            return stored_program(model, {**given}, key, imported)

        def imported() -> tuple[Graph, tuple[()]]:
            self._file.check_arrays()
            return build(), ()

        found = next((one for one in every if one.facts.get(KEY) == key), None)
        if found is None:
            return compiled_elsewhere(self._file, {**options}, compiled)
        return opened_program(found, False, {**options}, compiled)
