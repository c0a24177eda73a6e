"""Bugs of passes, plans and code generation."""

from __future__ import annotations

from fuzz.bugs import Bug

PRODUCT = r"@|matmul|einsum|linear|dot_general|rnn|gru|lstm"
BUGS = {
    "a load inside an expression that is kept is shared between rows": Bug(
        "rlx.codegen.cpu.rows.row_pipeline",
        "RowPipeline.sweep",
        " if e in at.memo}",
        "}",
        needs="softmax|norm|std|var",
    ),
    "a slice of a broadcast is taken for the whole": Bug(
        "rlx.rewrite.simplify",
        "_as_broadcast",
        " and own == shape[of_result]",
        "",
        needs=r"broadcast_to[^\n]*\)\[|broadcast_to.*v\d+\[",
    ),
    "what follows parallel products has one result": Bug(
        "rlx.rewrite.merge",
        "_is_plain",
        " and not node.bodies and not isinstance(node.type, TupleType)",
        "",
        needs=r"bidirectional|(ops\.(rnn|gru|lstm|scan).*){2}",
    ),
    "a window grows with the image that it must fit": Bug(
        "rlx.cost.io",
        "_grown",
        "if _missing(need, {**grown, s: n}) < missing",
        "if True",
        needs=r"ops\.conv\(",
        opened=True,
    ),
    "gaps between the elements of nothing": Bug(
        "rlx.ops.rules",
        "with_gaps",
        "dim_max(n + (n - 1) * gap, 0)",
        "n + (n - 1) * gap",
        needs=r"::2.*(grad|jvp)",
    ),
    "pins of the main graph are looked up in bodies": Bug(
        "rlx.api.planning",
        "Planning.fuse",
        "fusion.fuse(body, self.fusing)[0]",
        "fusion.fuse(body, replace(self.fusing, pins=self.options.pins))[0]",
        needs="scan|cond|loop|rnn|gru|lstm",
        ways=("pins",),
    ),
    "a size of 1 that broadcasts breaks a guard": Bug(
        "rlx.runtime.program",
        "CompiledProgram._variant",
        "if not self.has_variants or",
        "if True or",
        ways=("symbolic", "onnx", "save"),
        opened=True,
    ),
    "products that end in a truth value have no type": Bug(
        "rlx.codegen.cpu.product.gemm_driver",
        "ProductDriver.__init__",
        "MEMORY[call.spec.c_dtype]",
        '{k: MEMORY[k] for k in ("f64", "f32", "bf16", "f16", "i32", "i16", "i8", "u8")}[call.spec.c_dtype]',
        needs=f"({PRODUCT}).*([<>=] |cast)",
    ),
    "columns are merged although what follows tells them apart": Bug(
        "rlx.codegen.cpu.product.contraction",
        "plan_gemm",
        "[b.axes, out, *ends.steps], ends.other)",
        "[b.axes, out])",
        needs="conv|einsum|dot_general",
    ),
}
