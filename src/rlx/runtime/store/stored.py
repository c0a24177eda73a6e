"""Signed plans in files: running needs their outline, the rest is read when it is asked for."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlx.files import Json
from rlx.ir.graph import Graph
from rlx.plan.lir import LirBufferPlan, LirModule
from rlx.plan.memory.placer import Placer
from rlx.plan.outline import read_outline

if TYPE_CHECKING:
    from rlx.runtime.store.artifact import Artifact


def _plan_text() -> ModuleType:
    import rlx.plan.text as plan_text  # start time

    return plan_text


class StoredLir(LirModule):
    """A signed plan. It is what its writer had: nothing is verified again."""

    def __init__(self, file: Artifact, number: int, about: Json) -> None:
        self._file, self._number = file, number
        self.target, self.options, self.gate = about["target"], about["options"], about["gate"]
        data = json.loads(file.part(f"{number}.outline"))
        self._outline = read_outline(data["graph"], lambda digest: file.blobs[digest])
        self._outline.state_values = file.values("states", self._outline.state_inputs)
        self.planner = Placer.from_json(data["placer"], self._outline)

    @property
    def outline(self) -> Graph:
        return self._outline

    @functools.cached_property
    def _text(self) -> str:
        return self._file.text(f"{self._number}.plan")

    def _graph(self, start: str) -> Graph | None:
        """The graph whose block in the text of the plan begins so."""
        at = self._text.find(f"\n{start} ")
        if at < 0:
            return None
        from rlx.ir.text.read import read_signed  # start time, as for all that running does not need

        block = self._text[at + 1 : self._text.index("\n}\n", at) + 3]
        return self._file.read(block.removeprefix("weights "), read_signed)

    @functools.cached_property
    def mir(self) -> Graph:  # type: ignore[override]
        found = self._graph("graph")
        if found is None:
            raise self._file.container.fail("its plan has no graph")
        return found

    @functools.cached_property
    def derived(self) -> Graph | None:  # type: ignore[override]
        return self._graph("weights")

    @functools.cached_property
    def buffers(self) -> LirBufferPlan:  # type: ignore[override]
        plan: LirBufferPlan = _plan_text().read_buffers(self._text, self.mir, self.derived)
        return plan

    @functools.cached_property
    def unfused(self) -> Graph | None:  # type: ignore[override]
        return self._file.graph(f"{self._number}.unfused")

    @functools.cached_property
    def decisions(self) -> Any:
        from rlx.cost.decision import DecisionLog  # start time

        lines = self._lines("decision ")
        return DecisionLog.from_json(json.loads(line.removeprefix("decision ")) for line in lines)

    @functools.cached_property
    def again(self) -> dict[str, int]:  # type: ignore[override]
        lines = (line.removeprefix("again ").partition(" = ") for line in self._lines("again "))
        return {json.loads(key): json.loads(value) for key, _, value in lines}

    def _lines(self, start: str) -> list[str]:
        return [line for line in self._text.splitlines() if line.startswith(start)]

    @functools.cached_property
    def trace(self) -> Any:
        return _plan_text().read_trace(self._text)

    def specialize(self, binding: Mapping[str, int]) -> LirModule:
        """The same program placed for other sizes."""
        names = ("mir derived target options gate decisions planner unfused trace again").split()
        return LirModule(**{n: getattr(self, n) for n in names}, buffers=self.planner.plan(dict(binding)))
