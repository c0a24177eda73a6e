"""Models whose structure depends on inputs: imported and compiled once for each structure that appears.

Shapes in ONNX may depend on the *values* of inputs (the target of a Reshape, the length of a sequence,
whether an optional is there). Such inputs are found by importing: a refusal names those whose values it
needs. A program is then compiled for these values and kept for the next call that has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.errors import InputError
from rlx.frontend.onnx.call import NeedsValue
from rlx.frontend.onnx.importer import Imported, Importer
from rlx.frontend.onnx.load import load_model
from rlx.frontend.onnx.value import HostOutput
from rlx.ir.graph import Graph
from rlx.ir.tree import Nest
from rlx.records import dataclass


class Runnable(Protocol):
    """What a compiler gives: a program that takes arrays by name."""

    def run(self, inputs: Mapping[str, object]) -> Mapping[str, np.ndarray]: ...

    @property
    def stats(self) -> Mapping[str, Any]: ...


@dataclass
class Variant:
    """The model for one set of fixed values and shapes."""

    fixed: dict[str, Nest]
    shapes: dict[str, tuple[int, ...]]
    imported: Imported
    program: Runnable | None  # None where everything is known while importing, as with text

    def fits(self, inputs: Mapping[str, Nest]) -> bool:
        return all(_same(v, inputs[k]) for k, v in self.fixed.items()) and all(
            np.shape(inputs[k]) == v for k, v in self.shapes.items()
        )


class AdaptiveModel:
    """An ONNX model ready to run with any inputs it declares."""

    def __init__(self, model: object, compile: Callable[[Graph], Runnable]) -> None:
        self.model, self.folder = load_model(model)
        self.compile = compile
        constants = {t.name for t in self.model.graph.initializer}
        constants |= {t.values.name for t in self.model.graph.sparse_initializer}
        self.inputs = [i.name for i in self.model.graph.input if i.name not in constants]
        self.outputs = [o.name for o in self.model.graph.output]
        self.variants: list[Variant] = []

    def run(self, inputs: Mapping[str, Nest] | Sequence[Nest]) -> list[Nest]:
        """Outputs in order: arrays, lists of arrays for sequences, None for empty optionals."""
        given = self._named(inputs)
        variant = self.variant(given)
        flat: dict[str, Nest] = {}
        for name, place in variant.imported.inputs.items():
            _spread(place, given[name], flat)
        out = {} if variant.program is None else variant.program.run(flat)
        return [_gather(variant.imported.outputs[name], out) for name in self.outputs]

    def variant(self, inputs: Mapping[str, Nest]) -> Variant:
        """The program for these inputs, compiled if there is none yet."""
        for known in self.variants:
            if known.fits(inputs):
                return known
        fixed: dict[str, Nest] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        while True:
            try:
                imported = Importer(self.model, self.folder, fixed, shapes).run()
                break
            except NeedsValue as e:
                fresh = [
                    name for name in e.inputs if name.partition(".")[0] not in fixed or name not in shapes
                ]
                before = (len(fixed), len(shapes))
                self._fix(fresh, inputs, fixed, shapes)
                if (len(fixed), len(shapes)) == before:
                    raise
        graph = imported.graph
        program = self.compile(graph) if graph.outputs or graph.states else None
        made = Variant(fixed, shapes, imported, program)
        self.variants.append(made)
        return made

    def _fix(
        self,
        names: Sequence[str],
        inputs: Mapping[str, Nest],
        fixed: dict[str, Nest],
        shapes: dict[str, Nest],
    ) -> None:
        for name in names:
            top = name if name in inputs else name.rpartition(".")[0]
            value = inputs[top]
            if isinstance(value, np.ndarray) and top in self._shapeless() and top not in shapes:
                shapes[top] = value.shape
            else:
                fixed[top] = value

    def _shapeless(self) -> set[str]:
        infos = self.model.graph.input
        return {
            i.name
            for i in infos
            if i.type.HasField("tensor_type") and not i.type.tensor_type.HasField("shape")
        }

    def _named(self, inputs: Mapping[str, Nest] | Sequence[Nest]) -> dict[str, Nest]:
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            if len(inputs) > len(self.inputs):
                raise InputError(f"the model takes {len(self.inputs)} inputs, got {len(inputs)}")
            given = dict(zip(self.inputs, inputs, strict=False))
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise InputError(f"input {missing[0]!r} of the model is missing")
        return {name: _as_value(given[name]) for name in self.inputs}


def _as_value(value: Nest) -> Nest:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_as_value(v) for v in value]
    return np.asarray(value)


def _same(a: Nest, b: Nest) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return (
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        if a.dtype != object
        else bool(np.array_equal(a, b))
    )


def _spread(place: Nest, value: Nest, into: dict[str, Nest]) -> None:
    if isinstance(place, str):
        into[place] = value
    elif isinstance(place, list):
        for p, v in zip(place, value, strict=True):
            _spread(p, v, into)


def _gather(place: Nest, values: Mapping[str, np.ndarray]) -> Nest:
    if isinstance(place, str):
        return values[place]
    if isinstance(place, HostOutput):
        return place.make(values[place.tensor])
    return [_gather(p, values) for p in place] if isinstance(place, list) else place
