"""The form of each MIR node: what its op's `lower` rule says, kept for nodes that look alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rlx.ir.attr import attr_key
from rlx.ir.graph import Node
from rlx.ir.op import run_rule
from rlx.kernel.form import Form, Pieces
from rlx.kernel.scalar import Scalar, axes, const, in_range, rebuild, replace_axes, select, size

_FORMS: dict[object, Form] = {}
_MOST_FORMS = 10_000


def lower_node(node: Node) -> Form:
    """The form of a MIR node. Models repeat their layers, so forms are kept by op, attributes and types."""
    if node._form is None:
        node._form = _form_of(node)
    return cast(Form, node._form)


def _form_of(node: Node) -> Form:
    if node.bodies:
        form: Form = run_rule(node.op, "lower", *(o.type for o in node.operands), node=node)
        return form
    attrs = tuple([attr_key(v) for v in node.attrs.values()])
    key = (node.op, attrs, tuple([o.type for o in node.operands]))
    known = _FORMS.get(key)
    if known is None:
        if len(_FORMS) >= _MOST_FORMS:
            _FORMS.clear()
        known = _FORMS[key] = run_rule(node.op, "lower", *(o.type for o in node.operands), node=node)
    return known


def stored_operand(node: Node) -> Node:
    """The storage behind a value that belongs to its readers."""
    found = node.storage
    assert found is not None, node
    return found


def storage_of_codes(node: Node) -> Node | None:
    """The storage that a matmul of codes reads these and their factors from; None if they are apart."""
    first, *others = (o.storage for o in node.operands[1:])
    return first if all(other is first for other in others) else None


def stated_layouts(parts: Sequence[Node]) -> tuple[object, ...]:
    """How the parts of a matrix are stored: a layout each, or attributes and layouts if they are decoded."""
    return tuple(
        (*o.attrs.items(), ("layouts", stated_layouts(o.operands))) if o.op.decodes else o.attrs["layout"]
        for o in parts
    )


def pieces_body(form: Pieces) -> Scalar:
    """Boxes as one expression: the box that holds the point decides."""
    at = axes(len(form.space))
    out: Scalar | None = None
    for piece in reversed(form.pieces):
        local = [a - size(o) for a, o in zip(at, piece.offset, strict=True)]
        inside = None
        for a, o, n, total in zip(local, piece.offset, piece.extent, form.space, strict=True):
            if o == 0 and n == total:
                continue
            inside = in_range(a, n) if inside is None else inside & in_range(a, n)
        # An axis of one element has one index: what is computed from it stays regular.
        index = [const(0) if n == 1 else a for a, n in zip(local, piece.extent, strict=True)]
        body = guard_loads(replace_axes(piece.body, index), inside)
        out = body if out is None or inside is None else select(inside, body, out)
    assert out is not None
    return out


def guard_loads(body: Scalar, inside: Scalar | None) -> Scalar:
    """Loads that are only valid inside a box must not touch memory outside of it."""
    if inside is None:
        return body

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim == "load":
            return Scalar("load_or", (inside, const(0, e.dtype), *args), e.dtype, e.data)
        if e.prim == "load_or":
            return Scalar("load_or", (args[0] & inside, *args[1:]), e.dtype, e.data)
        return None

    return rebuild(body, change)
