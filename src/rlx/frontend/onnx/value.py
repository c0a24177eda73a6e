"""What a name of an ONNX graph can stand for while the model is imported.

- `Node`: a tensor, computed by the program.
- `Strings`: a tensor of text. Text is a host value: it exists at import only, never in a program.
- `list`: a sequence of values. Its length is known at import; its elements are nodes.
- `None`: an optional without an element, or an input that is not given.
- `Broken`: the result of a node that was refused; what depends on it is skipped, so that one run lists
  every problem.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from rlx.ir.graph import Node
from rlx.records import dataclass


@dataclass(frozen=True)
class Strings:
    """A tensor of text: an object array of str."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


class Broken:
    """The value of a node that could not be converted."""


BROKEN = Broken()

Value: TypeAlias = "Node | Strings | list[Any] | Broken | None"


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Node):
        return f"a tensor {value.tensor}"
    if isinstance(value, Strings):
        return f"a tensor of text of shape {list(value.shape)}"
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    return "nothing"
