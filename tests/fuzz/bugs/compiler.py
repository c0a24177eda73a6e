"""Bugs of passes and code generation."""

from __future__ import annotations

from fuzz.bugs import Bug

BUGS = {
    "a load inside an expression that is kept is shared between rows": Bug(
        "rlx.backend.cpu.row_pipeline", "RowPipeline.sweep", " if e in at.memo}", "}"
    ),
    "a slice of a broadcast is taken for the whole": Bug(
        "rlx.passes.simplify", "_as_broadcast", " and own == shape[of_result]", ""
    ),
    "what follows parallel products has one result": Bug(
        "rlx.passes.merge", "_is_plain", " and not isinstance(node.type, TupleType)", ""
    ),
}
