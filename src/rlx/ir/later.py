"""What graphs, nodes, ops, plans and programs call of modules that are built on them.

`Later` is the whole list. `rlx.wiring`, which `import rlx` loads, gives the object that finds each function
with its first use. So no module has to import one that imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    import numpy as np

    from rlx.ir.graph import Graph
    from rlx.ir.node import Node
    from rlx.ir.op import Op
    from rlx.ir.operand import Operand, Tensor


class PlanText(Protocol):
    """What `rlx.plan.lir` asks of `rlx.plan.text`."""

    def module_text(self, module: Any, blobs: dict[str, np.ndarray] | None, locations: bool) -> str: ...
    def parse_module(self, text: str, blobs: Mapping[str, np.ndarray] | None) -> Any: ...
    def canonical_text(self, module: Any) -> str: ...


class PlanFiles(Protocol):
    """What `rlx.plan.lir` asks of `rlx.plan.files`."""

    def save(self, module: Any, path: str | os.PathLike[str]) -> None: ...
    def load(self, path: str | os.PathLike[str]) -> Any: ...


class Measuring(Protocol):
    """What `rlx.runtime.program` asks of `rlx.api.measure`."""

    @property
    def measured(self) -> Callable[..., str]:
        """The largest decisions of a plan, built both ways with so many threads and timed, as a table."""

    @property
    def kernel_times(self) -> Callable[..., dict[int, float]]:
        """Microseconds of every kernel of a program, for sizes."""


class Later(Protocol):
    """Functions by name; the part that has each is in `rlx.wiring`."""

    @property
    def ops(self) -> ModuleType:
        """The package of all ops; they are declared once it is there."""

    @property
    def apply(self) -> Callable[[Op, Sequence[Operand], Mapping[str, object]], Tensor]:
        """A call of an op."""

    @property
    def evaluate(self) -> Callable[[Graph, Mapping[str, object]], dict[str, np.ndarray]]:
        """What a graph computes, by the reference."""

    @property
    def getitem(self) -> Callable[[Node, object], Node]:
        """`x[index]`"""

    @property
    def graph_text(self) -> Callable[[Graph], str]:
        """`str(graph)`"""

    @property
    def reduced(self) -> Callable[[Graph], tuple[Callable[[bytes], Graph], tuple[bytes]]]:
        """What pickle keeps of a graph."""

    @property
    def copy(self) -> Callable[[Graph], Graph]:
        """A separate graph that shares the arrays of another."""

    @property
    def with_states(self) -> Callable[[Graph, Mapping[str, str]], Graph]:
        """A graph in which some inputs are states."""

    @property
    def plan_text(self) -> PlanText:
        """Plans as text."""

    @property
    def plan_files(self) -> PlanFiles:
        """Plans in files."""

    @property
    def measuring(self) -> Measuring:
        """Times of kernels and of both sides of decisions."""

    @property
    def restore(self) -> Callable[[bytes, str, int, str | None], Any]:
        """The program in the bytes of its file, for a target, with threads and a debug mode."""

    @property
    def export(self) -> Callable[..., Any]:
        """A program written for C or WebAssembly, to a folder."""


_given: Later | None = None


def give(functions: Later) -> None:
    """Fill the table."""
    global _given
    _given = functions


def later() -> Later:
    """The table.

    >>> from rlx import Graph
    >>> g = Graph("double")
    >>> g.output("y", g.input("x", (2,), "f32") * 2.0)
    >>> later().graph_text(g) == str(g)
    True
    """
    assert _given is not None, "import rlx fills the table"
    return _given
