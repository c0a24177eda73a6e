"""What a name of an ONNX graph can stand for while the model is imported.

- `Node`: a tensor, computed by the program.
- `Strings`: a tensor of text. Text is a host value: it exists at import only, never in a program.
- `Labels`: a tensor of text that the program chooses from words known at import; it computes their numbers.
- `Maps`: a sequence of maps, one for each row of a tensor.
- `list`: a sequence of values. Its length is known at import; its elements are nodes.
- `Rows`: a sequence of as many elements as a loop has steps: the rows of a tensor.
- `None`: an optional without an element, or an input that is not given.
- `Broken`: the result of a node that was refused; what depends on it is skipped, so that one run lists
  every problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from rlx.errors import InputError
from rlx.ir.graph import Node
from rlx.records import dataclass


@dataclass(frozen=True)
class Strings:
    """A tensor of text: an object array of str."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


@dataclass(frozen=True)
class HostOutput:
    """An output that the host computes from a tensor of the program."""

    tensor: str
    """The graph output that it is computed from."""
    make: Callable[[np.ndarray], object]
    is_numbers: bool
    """Whether the tensor says as much, for those who take tensors only."""


@dataclass(frozen=True, eq=False)
class Labels:
    """A tensor of text: `words` at the numbers that the program computes."""

    numbers: Node
    words: np.ndarray

    def output(self, name: str) -> HostOutput:
        return HostOutput(name, self._chosen, False)

    def _chosen(self, at: np.ndarray) -> np.ndarray:
        many = len(self.words)
        if at.size and not -many <= at.min() <= at.max() < many:
            raise InputError(
                f"the model chooses a word by a number that is none of its {many}; check its inputs"
            )
        return np.asarray(self.words[at], dtype=object)


@dataclass(frozen=True, eq=False)
class Maps:
    """A sequence of maps with the same keys: one for each row of a tensor, whose columns are their values."""

    numbers: Node
    keys: Sequence[int | str]

    def output(self, name: str) -> HostOutput:
        keys = self.keys
        return HostOutput(name, lambda rows: [dict(zip(keys, r, strict=True)) for r in rows.tolist()], True)


@dataclass(frozen=True, eq=False)
class Rows:
    """A sequence whose elements are the rows of a tensor."""

    numbers: Node

    def output(self, name: str) -> HostOutput:
        return HostOutput(name, list, True)


class Broken:
    """The value of a node that could not be converted."""


BROKEN = Broken()

Value: TypeAlias = Node | Strings | Labels | Maps | Rows | list["Value"] | Broken | None
"""What a name of a model stands for; a list is a sequence of values."""

Outputs: TypeAlias = Value | tuple[Value, ...]
"""What a conversion returns: the value of the only output, or one for each output."""

InputPlace: TypeAlias = str | list["InputPlace"] | None
"""Name of a graph input, a list of them for a sequence, None for what is fixed at import."""

OutputPlace: TypeAlias = str | np.ndarray | HostOutput | list["OutputPlace"] | None
"""Name of a graph output, a list for a sequence, an array of text, what the host computes from a graph
output, None for an empty optional."""


def kind_of(value: object) -> str:
    """What a value is, for messages."""
    if isinstance(value, Node):
        return f"a tensor {value.tensor}"
    if isinstance(value, Strings):
        return f"a tensor of text of shape {list(value.shape)}"
    if isinstance(value, Labels):
        return f"a tensor of text that the program chooses, of shape {value.numbers.tensor}"
    if isinstance(value, Maps):
        return f"a sequence of maps of {len(value.keys)} keys"
    if isinstance(value, Rows):
        return f"a sequence of the rows of {value.numbers.tensor}"
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    return "nothing"
