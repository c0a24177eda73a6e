"""Control flow that is laid out with the program around it: which nodes are, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlx.ir.bind import holds
from rlx.ir.dim import Constraint
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import type_symbols

if TYPE_CHECKING:
    from rlx.kernel.form import Loop


def _loop_class() -> type[Loop]:
    from rlx.kernel.form import Loop  # start time: few programs have loops

    return Loop


def loop_form(node: Node) -> Loop | None:
    """The form of a node whose bodies the program itself runs; None for all others."""
    if node.op.role is not Role.COMPUTE or not node.bodies:
        return None
    if node._form is None:
        if node.op.host_only is not None:
            return None
        from rlx.kernel.lowering import lower_node  # start time: a program from a file knows its forms

        lower_node(node)
    return node._form if isinstance(node._form, _loop_class()) else None


def set_loop_form(node: Node, control: str, config: tuple[tuple[str, Any], ...], *counts: int) -> None:
    """Give a node the form that `loop_form` found for it when its program was written."""
    node._form = _loop_class()(control, config, *counts)


def is_branch(node: Node) -> bool:
    """Whether a run takes one of the node's bodies: guards of the others do not concern it."""
    form = loop_form(node)
    return form is not None and form.control == "cond"


def broken_guard(body: Graph, binding: Mapping[str, int]) -> Constraint | None:
    """What a body assumes about sizes and does not find; a branch in it needs one body that finds all."""
    for c in body.constraints:
        if not holds(c, binding):
            return c
    for node in body.nodes:
        if node.bodies and loop_form(node) is not None:
            found = [broken_guard(inner, binding) for inner in node.bodies]
            if None not in found or (not is_branch(node) and any(found)):
                return next(c for c in found if c is not None)
    return None


def is_open(body: Graph, binding: Mapping[str, int]) -> bool:
    """Whether a run with these sizes may take a body."""
    return broken_guard(body, binding) is None


def own_symbols(form: Loop) -> tuple[str, ...]:
    """Symbols of bodies that are sizes of its own: how many rows a slice has is the plan's choice."""
    return tuple(value for key, value in form.config if key == "symbol" and form.control == "slices")


def refusal(node: Node, form: Loop) -> str | None:
    """Why the memory of control flow cannot be planned ahead, if so: its sizes depend on data."""
    outside = {*node.graph.symbols(), *own_symbols(form)}
    found = set(type_symbols(node.type)) - {s for o in node.operands for s in type_symbols(o.type)}
    if form.control == "loop" and len(node.bodies[0].outputs) > form.carries + 1:
        return "how many rows it stacks depends on data"
    for body in node.bodies:
        later = [s for s in body.symbols() if s not in outside or s in found]
        if later:
            return f"size {later[0]!r} in its body depends on data"
    return None


def is_laid_out(node: Node) -> bool:
    """Whether the bodies of a node become kernel calls of the program around it."""
    form = loop_form(node)
    return form is not None and refusal(node, form) is None
