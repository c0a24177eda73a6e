"""Where each function of `rlx.ir.later` is. Each is imported with its first use: `import rlx` stays light."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rlx.ir.later import give

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    import numpy as np

    from rlx.ir.graph import Graph
    from rlx.ir.later import Measuring, PlanFiles, PlanText
    from rlx.ir.node import Node
    from rlx.ir.op import Op
    from rlx.ir.operand import Operand, Tensor
    from rlx.runtime.exported import Exported
    from rlx.runtime.program import CompiledProgram

# Imports inside functions, here: all for the start time of `import rlx`.


class _Functions:
    """What `rlx.ir.later.Later` lists, kept once it is found."""

    @cached_property
    def ops(self) -> ModuleType:
        from rlx import ops

        return ops

    @cached_property
    def apply(self) -> Callable[[Op, Sequence[Operand], Mapping[str, object]], Tensor]:
        from rlx.ir.build import apply

        return apply

    @cached_property
    def evaluate(self) -> Callable[[Graph, Mapping[str, object]], dict[str, np.ndarray]]:
        from rlx.reference.interpreter import evaluate

        return evaluate

    @cached_property
    def getitem(self) -> Callable[[Node, object], Node]:
        from rlx.ops.array.indexing import getitem

        return getitem

    @cached_property
    def graph_text(self) -> Callable[[Graph], str]:
        from rlx.ir.text.write import graph_text

        return graph_text

    @cached_property
    def reduced(self) -> Callable[[Graph], tuple[Callable[[bytes], Graph], tuple[bytes]]]:
        from rlx.ir.text.files import reduced

        return reduced

    @cached_property
    def copy(self) -> Callable[[Graph], Graph]:
        from rlx.ir.rewrite import copy

        return copy

    @cached_property
    def with_states(self) -> Callable[[Graph, Mapping[str, str]], Graph]:
        from rlx.transform.stateful import with_states

        return with_states

    @cached_property
    def plan_text(self) -> PlanText:
        from rlx.plan import text

        return text

    @cached_property
    def plan_files(self) -> PlanFiles:
        from rlx.plan import files

        return files

    @cached_property
    def measuring(self) -> Measuring:
        from rlx.api import measure

        return measure

    @cached_property
    def restore(self) -> Callable[[bytes, str, int, str | None], CompiledProgram]:
        from rlx.api.session import restore

        return restore

    @cached_property
    def export(self) -> Callable[..., Exported]:
        from rlx.export.export import export

        return export


def give_functions() -> None:
    """Fill the table of `rlx.ir.later`."""
    give(_Functions())
