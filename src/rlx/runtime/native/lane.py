"""Runs of small programs: inputs are copied into memory that the program's tables point to for good.

To find the address of an array takes longer than to copy a few KiB, and much of what is checked for every
run can be checked once. A lane is a context whose inputs and outputs have memory of their own. It takes
arrays of just the dtypes and shapes that it was made for, and refuses all else: then `CompiledProgram.run`
goes the long way, which knows all that is allowed and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlx.runtime.native.driver import NativeProgram, RecordError

if TYPE_CHECKING:
    from rlx.runtime.context import Context

LARGEST = 16 << 10  # bytes of an array that is copied as fast as its address is found

Named = Sequence[tuple[str, np.ndarray]]
Take = Callable[[object], "dict[str, np.ndarray] | None"]


class Failing(Protocol):
    """What knows the kernels of a program."""

    def kernel_error(self, e: RecordError, binding: Mapping[str, int]) -> Exception: ...


class Lane:
    """A context with memory for inputs and outputs; `take` runs it, or gives None for other inputs."""

    __slots__ = ("context", "inputs", "outputs", "take")

    def __init__(self, context: Context, inputs: Named, outputs: Named, native: NativeProgram) -> None:
        self.context, self.inputs, self.outputs = context, inputs, outputs
        self.take: Take = _taker(inputs, outputs, native.caller())


def _taker(inputs: Named, outputs: Named, call: Callable[[], None]) -> Take:
    """`Lane.take`, which finds all that it reads in its own variables."""
    places = tuple([(name, memory.dtype, memory.shape, memory) for name, memory in inputs])
    results = tuple([(name, memory.copy) for name, memory in outputs])
    count, array = len(places), np.ndarray

    def take(given: object) -> dict[str, np.ndarray] | None:
        if type(given) is not dict or len(given) != count:
            return None
        for name, dtype, shape, memory in places:
            value = given.get(name)
            if type(value) is not array or value.dtype is not dtype or value.shape != shape:
                return None
            memory[...] = value
        call()
        return {name: copy() for name, copy in results}

    return take


class Lanes:
    """Lanes of a program that no run uses, for the sizes of its last runs.

    Threads take them from a list and put them back, each by one operation that no other thread sees half
    done. Where the sizes change or weights do, there is a new list: a lane that is in use then is dropped
    with the old one.
    """

    def __init__(self) -> None:
        self._idle: list[Lane] = []
        self._shapes: object = None  # of the last run that was not quick

    def __bool__(self) -> bool:
        return self._shapes is not None

    def run(self, given: object, program: Failing) -> dict[str, np.ndarray] | None:
        """The outputs of a run; None if no lane takes the inputs."""
        idle = self._idle
        if not idle:
            return None
        try:
            lane = idle.pop()
        except IndexError:  # another thread has just taken the last one
            return None
        try:
            return lane.take(given)
        except RecordError as e:
            raise program.kernel_error(e, lane.context.plan.binding) from None
        finally:
            idle.append(lane)

    def context(self, key: tuple[int, ...]) -> Context | None:
        """The context of a lane, for a run that goes the long way."""
        idle = self._idle
        try:
            lane = idle.pop()
        except IndexError:
            return None
        if lane.context.key == key:
            return lane.context
        idle.append(lane)
        return None

    def open(self, context: Context, inputs: Named, outputs: Named) -> bool:
        """Make a lane of the context of a run that is over, if it is small and the last one was like it."""
        if len(context.steps) != 1 or any(a.nbytes > LARGEST for _, a in (*inputs, *outputs)):
            return False
        native = context.steps[0].program
        if native is None or context.steps[0].reveals or context.keeps_edges:
            return False
        shapes = context.key, [a.shape for _, a in inputs]
        if shapes != self._shapes:
            self._shapes, self._idle = shapes, []
            if context.key:  # other sizes are likely to follow
                return False
        own = [[(name, np.empty(a.shape, a.dtype)) for name, a in arrays] for arrays in (inputs, outputs)]
        nodes = [*context.graph.inputs, *context.graph.outputs.values()]
        for node, (_, memory) in zip(nodes, (*own[0], *own[1]), strict=True):
            context.connect(node.id, memory)
        self._idle.append(Lane(context, own[0], own[1], native))
        return True

    def clear(self) -> None:
        """Drop all lanes: they point to weights that are no longer there."""
        self._idle = []
