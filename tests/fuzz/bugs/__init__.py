"""Old bugs, each as lines of source that bring it back: what the fuzzer must find."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from rlx.fuzz.programs.program import Program


@dataclass(frozen=True)
class Bug:
    """A function of RLX in which `fixed` becomes `broken`.

    `needs` is text that every program which shows it has (a pattern), `ways` are those that can show it, if
    not all can, `opened` says that some size must be open: the search leaves the other programs out.
    """

    module: str
    function: str
    fixed: str
    broken: str
    needs: str = ""
    ways: tuple[str, ...] = ()
    opened: bool = False

    def may_show_in(self, program: Program) -> bool:
        """Whether a program has what it takes."""
        way = not self.ways or bool({*self.ways} & {*program.ways})
        return (
            way
            and (bool(program.others) or not self.opened)
            and bool(re.search(self.needs, program.source(), re.DOTALL))
        )

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Put it back until the patch is undone, also for modules that have imported the function."""
        module = importlib.import_module(self.module)
        owner: Any = module
        *path, name = self.function.split(".")
        for part in path:
            owner = getattr(owner, part)
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.fixed) == 1, f"{self.function} has changed: write the bug anew"
        made: dict[str, Any] = {}
        code = compile(source.replace(self.fixed, self.broken), module.__file__ or "", "exec")
        exec(code, dict(vars(module)), made)
        broken = getattr(made[name], "__func__", made[name])  # of a static method
        patch.setattr(function, "__code__", inspect.unwrap(broken).__code__)


def all_bugs() -> dict[str, Bug]:
    """Every bug by what it was."""
    from fuzz.bugs import compiler, frontend

    return {**compiler.BUGS, **frontend.BUGS}
