"""Bugs of tracing and of reading models."""

from __future__ import annotations

from fuzz.bugs import Bug

COMPARED = r"\.shape\[-?\d+\] (==|!=|in)"
BUGS = {
    "a traced size equals a number by structure": Bug(
        "rlx.ir.dims.expr",
        "Expr.__eq__",
        "return reader is not None and equals(self, other, reader)",
        "return False",
        needs=COMPARED,
        ways=("jit",),
        opened=True,
    ),
    "what a size was compared with is no guard": Bug(
        "rlx.frontend.trace",
        "_Reader.answer",
        'Constraint("eq" if holds else "ne", a, b, where)',
        'Constraint("min", a, 0, where)',
        needs=COMPARED,
        ways=("jit",),
        opened=True,
    ),
    "nodes of a model are taken in the order of the file": Bug(
        "rlx.frontend.onnx.order",
        "in_order",
        "if all(at < i",
        "if True or all(at < i",
        ways=("onnx",),
    ),
}
