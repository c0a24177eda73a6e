"""Weights that are computed on request, one at a time: never all of them are in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from rlx.errors import InputError
from rlx.ir.dtype import LazyArray, ParamValue
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.plan.lir import LirModule
from rlx.runtime.memory import drop_pages

SLAB = 1 << 22
"""Bytes of a tensor of a file that are in memory while it is laid out."""


def lazy_weights(lir: LirModule, values: Mapping[str, ParamValue]) -> dict[int, LazyArray]:
    """Every weight of a program by node id, from the values of params; what lacks a value is left out."""
    derived = lir.derived
    made: dict[int, LazyArray] = {}
    for node in lir.mir.nodes:
        if node.op.role is Role.CONSTANT:
            make, fill = _given(node.attrs["value"].array), None
        elif node.op.role is not Role.PARAM:
            continue
        elif derived is not None and node.attrs["name"] in derived.outputs:
            wanted = cone(derived.outputs[node.attrs["name"]])
            if any(n.op.role is Role.PARAM and n.attrs["name"] not in values for n in wanted):
                continue
            shape = node.tensor.bind({})
            make, fill = _computed(derived, wanted, values), _filled(derived, wanted[-1], values, shape)
        elif node.attrs["name"] in values:
            value = values[node.attrs["name"]]
            make, fill = _given(value), _copied(value)
        else:
            continue
        made[node.id] = LazyArray(node.dtype, node.tensor.bind({}), make, fill)
    return made


def params_without_value(lir: LirModule) -> InputError:
    """The error of a run that reads weights which have no value yet; it names all of them."""
    source = lir.derived or lir.mir
    made_from = {} if lir.derived is None else {name: cone(n) for name, n in lir.derived.outputs.items()}
    params = [node for node in lir.mir.nodes if node.op.role is Role.PARAM]
    read = [n for node in params for n in made_from.get(node.attrs["name"], [node])]
    names = {n.attrs["name"] for n in read if n.op.role is Role.PARAM} - set(source.param_values)
    missing = ", ".join(map(repr, sorted(names)))
    what = f"param {missing} has no value" if len(names) == 1 else f"params {missing} have no values"
    return InputError(f"{what}; give {'it one' if len(names) == 1 else 'them values'} with set_param")


def _given(array: ParamValue) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(array)


def _copied(value: ParamValue) -> Callable[[np.ndarray], None] | None:
    """What writes a tensor of a file to its place, part by part."""
    part = value.part if isinstance(value, LazyArray) else None
    if part is None:
        return None
    step = max(1, SLAB // value.dtype.itemsize)

    def fill(place: np.ndarray) -> None:
        elements = place.view(value.dtype)
        for first in range(0, len(elements), step):
            stop = min(first + step, len(elements))
            elements[first:stop] = part(first, stop)

    return fill


def _computed(
    derived: Graph, wanted: list[Node], values: Mapping[str, ParamValue]
) -> Callable[[], np.ndarray]:
    return lambda: _run(derived, wanted, values)


def _filled(
    derived: Graph, node: Node, values: Mapping[str, ParamValue], shape: tuple[int, ...]
) -> Callable[[np.ndarray], None] | None:
    """What writes a weight to its place; None where only its value is known how to be computed."""
    if not node.op.has("store_in"):
        return None

    def fill(place: np.ndarray) -> None:
        _store(derived, node, values, place.view(node.dtype.np).reshape(shape))

    return fill


def _store(derived: Graph, node: Node, values: Mapping[str, ParamValue], place: np.ndarray) -> None:
    """Write the value of a node where zeros are, and first the others that share the place."""
    if not node.op.has("store_in"):
        place[...] = evaluated(derived, node, values)
        return
    x, *shared = node.operands
    for other in shared:
        _store(derived, other, values, place)
    if _stored_by_parts(node, x, values, place):
        return
    value = evaluated(derived, x, values)
    node.op.store_in(place, value, **node.attrs)
    drop_pages(value)


def _stored_by_parts(node: Node, x: Node, values: Mapping[str, ParamValue], place: np.ndarray) -> bool:
    """Write a large tensor of a file, or its transpose, part by part: the whole is never in memory twice.
    False where that is not for it."""
    transposed = x.op is get_op("transpose")
    source = x.operands[0] if transposed else x
    value = values[source.attrs["name"]] if source.op.role is Role.PARAM else None
    if not isinstance(value, LazyArray) or value.part is None or value.nbytes <= SLAB:
        return False
    axis = x.attrs["perm"].index(0) if transposed else 0
    step = node.op.store_step(axis, **node.attrs) if node.op.has("store_step") else None
    if step is None or x.rank != len(value.shape):
        return False
    count, width = value.shape[0], math.prod(value.shape[1:])
    rows = max(1, SLAB // (width * value.dtype.itemsize * step)) * step
    for first in range(0, count, rows):
        stop = min(first + rows, count)
        part = value.part(first * width, stop * width).reshape(stop - first, *value.shape[1:])
        turned = np.asarray(x.op.ref(part, **x.attrs)) if transposed else part
        node.op.store_part(place, turned, axis, first, **node.attrs)
    return True


def evaluated(graph: Graph, node: Node, values: Mapping[str, ParamValue]) -> np.ndarray:
    """The value of a node of a graph of weights."""
    return _run(graph, cone(node), values)


def cone(node: Node) -> list[Node]:
    """A node and all that it is computed from, operands first."""
    found: dict[int, Node] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if n.id not in found:
            found[n.id] = n
            todo += n.operands
    return [found[id] for id in sorted(found)]


def _run(derived: Graph, wanted: list[Node], values: Mapping[str, ParamValue]) -> np.ndarray:
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
