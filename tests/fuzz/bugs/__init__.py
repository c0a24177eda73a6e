"""Old bugs, each as lines of source that bring it back: what the fuzzer must find."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Bug:
    """A function of RLX in which `fixed` becomes `broken`."""

    module: str
    function: str
    fixed: str
    broken: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Put it back until the patch is undone."""
        module = importlib.import_module(self.module)
        owner: Any = module
        *path, name = self.function.split(".")
        for part in path:
            owner = getattr(owner, part)
            owner = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert source.count(self.fixed) == 1, f"{self.function} has changed: write the bug anew"
        made: dict[str, Any] = {}
        exec(
            compile(source.replace(self.fixed, self.broken), module.__file__ or "", "exec"),
            vars(module),
            made,
        )
        patch.setattr(owner, name, made[name])
