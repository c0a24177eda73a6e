"""Weights that are computed on request, one at a time: never all of them are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import InputError
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.plan.lir import LirModule
from rlx.runtime.memory import drop_pages

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class LazyArray:
    """Dtype and shape of an array that is computed whenever NumPy needs it.

    >>> from rlx.ir.dtype import dtype
    >>> lazy = LazyArray(dtype("f32"), (2,), lambda: np.ones(2, np.float32))
    >>> lazy.nbytes, np.asarray(lazy)
    (8, array([1., 1.], dtype=float32))
    """

    def __init__(self, of: DType, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> None:
        self.dtype, self.shape, self._make = of.np, shape, make
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * of.np.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._make(), dtype)


def lazy_weights(lir: LirModule, values: Mapping[str, np.ndarray]) -> dict[int, LazyArray]:
    """Every weight of a program by node id, from the values of params; what lacks a value is left out."""
    derived = lir.derived
    made: dict[int, LazyArray] = {}
    for node in lir.mir.nodes:
        if node.op.role is Role.CONSTANT:
            make = _given(node.attrs["value"].array)
        elif node.op.role is not Role.PARAM:
            continue
        elif derived is not None and node.attrs["name"] in derived.outputs:
            wanted = _cone(derived.outputs[node.attrs["name"]])
            if any(n.op.role is Role.PARAM and n.attrs["name"] not in values for n in wanted):
                continue
            make = _computed(derived, wanted, values)
        elif node.attrs["name"] in values:
            make = _given(values[node.attrs["name"]])
        else:
            continue
        made[node.id] = LazyArray(node.dtype, node.tensor.bind({}), make)
    return made


def params_without_value(lir: LirModule) -> InputError:
    """The error of a run that reads weights which have no value yet; it names all of them."""
    source = lir.derived or lir.mir
    made_from = {} if lir.derived is None else {name: _cone(n) for name, n in lir.derived.outputs.items()}
    params = [node for node in lir.mir.nodes if node.op.role is Role.PARAM]
    read = [n for node in params for n in made_from.get(node.attrs["name"], [node])]
    names = {n.attrs["name"] for n in read if n.op.role is Role.PARAM} - set(source.param_values)
    missing = ", ".join(map(repr, sorted(names)))
    what = f"param {missing} has no value" if len(names) == 1 else f"params {missing} have no values"
    return InputError(f"{what}; give {'it one' if len(names) == 1 else 'them values'} with set_param")


def _given(array: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: array


def _computed(
    derived: Graph, wanted: list[Node], values: Mapping[str, np.ndarray]
) -> Callable[[], np.ndarray]:
    return lambda: _run(derived, wanted, values)


def _cone(node: Node) -> list[Node]:
    """A node and all that it is computed from, operands first."""
    found: dict[int, Node] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if n.id not in found:
            found[n.id] = n
            todo += n.operands
    return [found[id] for id in sorted(found)]


def _run(derived: Graph, wanted: list[Node], values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The value of the last of these nodes; what is not read again is dropped at once."""
    from rlx.reference.interpreter import Interpreter  # start time: native code needs none

    interpreter = Interpreter(derived)
    last_reader = {o.id: n.id for n in wanted for o in n.operands}
    for n in wanted:
        is_param = n.op.role is Role.PARAM
        interpreter.values[n.id] = np.asarray(values[n.attrs["name"]]) if is_param else interpreter.compute(n)
        for o in n.operands:
            if last_reader[o.id] == n.id:
                dropped = interpreter.values.pop(o.id, None)
                if isinstance(dropped, np.ndarray):
                    drop_pages(dropped)
    return interpreter.array(wanted[-1])
