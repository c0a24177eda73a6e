"""A random program: inputs, lines of Python, results. It is data, so that it can be shrunk and printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.fuzz.programs.inputs import Values
from rlx.ir.graph import Graph, Node

Size = int | str
"""A number, or the name of one of the program's sizes."""

BATCH = "batch"
"""The name of the size that vmap adds."""

ASKS = re.compile(r"\.shape\[-?\d+\] (==|!=|in)|ops\.squeeze\(\w+\)")
"""A line that compares a size with a number, or drops axes that are known to be 1."""

PROGRAM = "<program>"
"""The file that lines of a program seem to come from."""

HEADER = "import numpy as np\nimport rlx\nfrom rlx import ops\nfrom rlx.ir.op import get_op as op\n"


@dataclass(frozen=True)
class Input:
    """One argument: its type, what values it takes, and whether a graph has it as a weight."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    values: Values
    weight: bool = False
    mapped: bool = True  # whether vmap maps over it


@dataclass(frozen=True)
class Step:
    """`results = text`: one line of the program."""

    results: tuple[str, ...]
    text: str

    def names(self) -> set[str]:
        """What the line reads."""
        return set(re.findall(r"\b[xv]\d+\b", self.text))

    def renamed(self, old: str, new: str) -> Step:
        return replace(self, text=re.sub(rf"\b{old}\b", new, self.text))


@dataclass(frozen=True)
class Program:
    """A function of its inputs, a transform of it, and the ways in which it is checked."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)  # sizes of a second call, of open axes
    transform: str = ""  # a name of TRANSFORMS; "" is the function itself
    wrt: int = 0  # the input that derivatives are taken by
    ways: tuple[str, ...] = ()
    number: int = 0  # seeds arrays and choices of oracles

    def shape(self, given: Input, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        known = {**self.sizes, **(sizes or {})}
        return tuple(d if isinstance(d, int) else known[d] for d in self.dims(given))

    def dims(self, given: Input) -> tuple[Size, ...]:
        """The shape of an argument, by names of sizes; vmap adds an axis."""
        batched = "vmap" in self.transform and given.mapped
        return (BATCH, *given.shape) if batched else given.shape

    def arrays(self, sizes: Mapping[str, int] | None = None) -> list[np.ndarray]:
        """What the function is called with; the same in every process."""
        return [
            x.values.array(x.dtype, self.shape(x, sizes), (self.number, i)) for i, x in enumerate(self.inputs)
        ]

    def source(self) -> str:
        """The function f as Python text, and g, a transform of it."""
        lines = [f"def f({', '.join(x.name for x in self.inputs)}):"]
        lines += [f"    {', '.join(s.results)} = {s.text}" for s in self.steps]
        lines.append(f"    return ({', '.join(self.outputs)},)")
        axes = tuple(0 if x.mapped else None for x in self.inputs)
        return "\n".join(lines) + "\n" + TRANSFORMS[self.transform].format(wrt=self.wrt, axes=axes)

    @property
    def entry(self) -> str:
        """The name of the function that is called."""
        return "g" if self.transform else "f"

    def function(self, **names: Any) -> Callable[..., Any]:
        """The function itself; `names` replace what its text finds under them."""
        space: dict[str, Any] = {}
        exec(HEADER, space)
        space |= names
        exec(compile(self.source(), PROGRAM, "exec"), space)  # text of our own grammar
        made: Callable[..., Any] = space[self.entry]
        return made

    def graph(
        self,
        open_sizes: Sequence[str] = (),
        weights: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> Graph:
        """The function as a graph; sizes named in `open_sizes` are symbols, the others those of the program,
        or `sizes`."""
        function, arrays = self.function(), self.arrays(sizes)
        graph = Graph("program")
        nodes: list[Node] = []
        for x, array in zip(self.inputs, arrays, strict=True):
            dims = self.dims(x)
            if x.weight and weights:
                nodes.append(graph.param(x.name, array.shape, x.dtype, array))
                continue
            shape = [d if d in open_sizes else n for d, n in zip(dims, array.shape, strict=True)]
            nodes.append(graph.input(x.name, shape, x.dtype))
        with graph.building():
            out = function(*nodes)
            graph.set_outputs([n if isinstance(n, Node) else graph.constant(n) for n in out])
        return graph

    def feed(self, graph: Graph, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """Arrays for those inputs that are inputs of the graph."""
        names = {n.attrs["name"] for n in graph.inputs}
        pairs = zip(self.inputs, self.arrays(sizes), strict=True)
        return {x.name: array for x, array in pairs if x.name in names}

    @property
    def asks_about_sizes(self) -> bool:
        """Whether a line compares a size with a number."""
        return any(ASKS.search(s.text) for s in self.steps)

    @property
    def keeps_sizes(self) -> bool:
        """Whether it holds on to sizes that it found equal: derivatives do, and lines that read a shape."""
        return bool(self.transform) or any(".shape" in s.text for s in self.steps)

    def open_sizes(self) -> tuple[str, ...]:
        """Names of sizes that a second call changes."""
        return tuple(self.others)


_LOSS = """
def loss(*args):
    return ops.sum(ops.stack([ops.sum(ops.sin(ops.cast(y, "f32"))) for y in f(*args)]))
"""
_GRAD = f"{_LOSS}\ndef g(*args):\n    return (rlx.grad(loss, argnums={{wrt}})(*args),)\n"

TRANSFORMS: dict[str, str] = {
    "": "",
    "grad": _GRAD,
    "grad of grad": f"""{_LOSS}
def slope(*args):
    return ops.sum(rlx.grad(loss, argnums={{wrt}})(*args) * 0.5)

def g(*args):
    return (rlx.grad(slope, argnums={{wrt}})(*args),)
""",
    "vmap": "\ndef g(*args):\n    return rlx.vmap(f, in_axes={axes})(*args)\n",
    "vmap of grad": _GRAD.replace("def g(", "def one(")
    + "\ndef g(*args):\n    return rlx.vmap(one, in_axes={axes})(*args)\n",
    "jvp": "\ndef g(*args):\n    values, slopes = rlx.jvp(f, args, tuple(x * 0.5 for x in args))"
    "\n    return (*values, *slopes)\n",
}
"""What is done to f, as the text that follows it; the result is g."""
