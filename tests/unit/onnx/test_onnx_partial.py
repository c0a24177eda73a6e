"""Shape arithmetic stays symbolic: one program for all sizes, guards where an equality cannot be proved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import parser  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import GuardError, ModelImportError, RlxError  # noqa: E402
from rlx.frontend.onnx.sizes.arithmetic import Quotient, Scaled, Undecided  # noqa: E402
from rlx.frontend.onnx.sizes.shape_eval import PartialEvaluator  # noqa: E402
from rlx.ir.dim import ceildiv, sym  # noqa: E402
from rlx.reference.interpreter import evaluate  # noqa: E402

N, M = sym("N"), sym("M")


def parse(text: str, opset: int = 17) -> Any:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}')


def type_of(text: str, name: str = "y", opset: int = 17) -> str:
    return str(rlx.from_onnx(parse(text, opset)).outputs[name].type)


CASES = {
    "flatten by a product": (
        """s = Shape (x) a = Gather <axis = 0> (s, zero0) b = Gather <axis = 0> (s, one0) p = Mul (a, b)
           q = Unsqueeze (p, axes) r = Concat <axis = 0> (q, three) y = Reshape (x, r)""",
        "f32[M*N,3]",
    ),
    "reverse of shape": (
        "s = Shape (x) a = Gather <axis = 0> (s, swap) y = Expand (value, a)",
        "f32[M,N]",
    ),
    "half, rounded up": (
        """s = Shape <end = 1> (x) f = Cast <to = 1> (s) h = Div (f, two) c = Ceil (h) i = Cast <to = 7> (c)
           y = Expand (value, i)""",
        "f32[ceildiv(N,2)]",
    ),
    "integer halves": ("s = Shape <end = 1> (x) h = Div (s, itwo) y = Expand (value, h)", "f32[N//2]"),
    "remainder": ("s = Shape <end = 1> (x) h = Mod (s, itwo) y = Expand (value, h)", "f32[N%2]"),
    "product of all": ("s = Shape (x) p = ReduceProd <keepdims = 1> (s) y = Expand (value, p)", "f32[3*M*N]"),
    "largest": (
        "s = Shape <end = 2> (x) p = ReduceMax <keepdims = 1> (s) y = Expand (value, p)",
        "f32[max(M,N)]",
    ),
    "size": ("p = Size (x) q = Unsqueeze (p, axes) y = Expand (value, q)", "f32[3*M*N]"),
    "where not minus one": (
        "s = Shape (x) e = Equal (s, minus) w = Where (e, ones, s) y = Expand (value, w)",
        "f32[N,M,3]",
    ),
    "constant of shape": ("s = Shape (x) y = ConstantOfShape (s)", "f32[N,M,3]"),
    "range": ("s = Shape <end = 1> (x) a = Squeeze (s) y = Range (zero0, a, one0)", "i64[N]"),
    "range by two": (
        "s = Shape <end = 1> (x) a = Squeeze (s) y = Range (zero0, a, two0)",
        "i64[ceildiv(N,2)]",
    ),
    "slice of shape": ("s = Shape (x) a = Slice (s, one, three) y = ConstantOfShape (a)", "f32[M,3]"),
    "slice to the end": ("a = Slice (x, one, far) y = Identity (a)", "f32[N-min(N,1),M,3]"),
    "last one": ("a = Slice (x, minus1, far) y = Identity (a)", "f32[min(N,1),M,3]"),
    "tile by a size": ("s = Shape (x) y = Tile (x, s)", "f32[N*N,M*M,9]"),
    "split in two": ("y, z = Split <axis = 0> (x)", "f32[ceildiv(N,2),M,3]"),
    "running sum": ("s = Shape (x) c = CumSum (s, zero0) y = ConstantOfShape (c)", "f32[N,M+N,M+N+3]"),
    "keep by zero": ("y = Reshape (x, keep)", "f32[N,3*M]"),
    "keep and infer": (
        "s = Shape <end = 1> (x) c = Concat <axis = 0> (s, minus1) y = Reshape (x, c)",
        "f32[N,3*M]",
    ),
}

CONSTANTS = """
    zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()
    three = Constant <value_ints = [3]> ()
    axes = Constant <value_ints = [0]> () swap = Constant <value_ints = [1, 0]> ()
    minus1 = Constant <value_ints = [-1]> () minus = Constant <value_ints = [-1]> ()
    ones = Constant <value_ints = [1, 1, 1]> () far = Constant <value_ints = [9223372036854775807]> ()
    itwo = Constant <value_ints = [2]> () two = Constant <value_float = 2.0> ()
    value = Constant <value_float = 1.5> ()
    zero0 = Constant <value_int = 0> () one0 = Constant <value_int = 1> () two0 = Constant <value_int = 2> ()
    keep = Constant <value_ints = [0, -1]> ()
"""


@pytest.mark.parametrize("name", CASES)
def test_shape_arithmetic(name: str) -> None:
    nodes, want = CASES[name]
    text = f"main (float[N, M, 3] x) => (y) {{ {CONSTANTS} {nodes} }}"
    from rlx.ir.types import parse_type

    graph = rlx.from_onnx(parse(text))
    assert graph.outputs["y"].type == parse_type(want)
    for n, m in ((4, 3), (2, 5), (1, 1)):  # the same program for every size
        x = np.arange(n * m * 3, dtype=np.float32).reshape(n, m, 3)
        from onnx.reference import ReferenceEvaluator

        ref = ReferenceEvaluator(parse(text))
        if name == "split in two" and n == 1:
            continue
        np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], ref.run(["y"], {"x": x})[0])


def test_dead_shape_arithmetic_is_dropped() -> None:
    graph = rlx.from_onnx(
        parse(
            """main (float[N, 4] x) => (float[N, 2, 2] y) {
            s = Shape <end = 1> (x) t = Constant <value_ints = [2, 2]> ()
            c = Concat <axis = 0> (s, t) y = Reshape (x, c) }"""
        )
    )
    assert [n.op.name for n in graph.nodes] == ["input", "reshape"]


def test_an_equality_that_cannot_be_proved_is_a_guard() -> None:
    graph = rlx.from_onnx(parse("main (float[N] x, float[M] z) => (y) { y = Add (x, z) }"))
    assert [c.describe() for c in graph.constraints] == ["M equals N"]
    one = np.ones(3, np.float32)
    assert evaluate(graph, {"x": one, "z": one})["y"].tolist() == [2, 2, 2]
    with pytest.raises(GuardError, match="M equals N"):
        evaluate(graph, {"x": one, "z": np.ones(1, np.float32)})  # a symbol is never silently 1


def test_an_equality_that_is_false_is_refused() -> None:
    with pytest.raises(ModelImportError, match="do not broadcast"):
        rlx.from_onnx(parse("main (float[N, 3] x, float[N, 4] z) => (y) { y = Add (x, z) }"))


SQUEEZE_IF_ONE = """
main (float[2, N] x) => (y) {
    s = Shape <start = 1> (x) one = Constant <value_ints = [1]> () c = Equal (s, one)
    y = If (c) <then_branch = yes () => (float[2] a) { a = Squeeze (x, one) },
                else_branch = no () => (float[2, N] b) { b = Identity (x) }>
}
"""


def test_squeeze_if_one_becomes_a_guard() -> None:
    graph = rlx.from_onnx(parse(SQUEEZE_IF_ONE))
    assert str(graph.outputs["y"].type) == "f32[2]"
    assert "1 equals N" in {c.describe() for c in graph.constraints} | {
        f"{c.rhs} equals {c.lhs}" for c in graph.constraints
    }
    assert evaluate(graph, {"x": np.ones((2, 1), np.float32)})["y"].shape == (2,)
    with pytest.raises(GuardError):
        evaluate(graph, {"x": np.ones((2, 2), np.float32)})


def test_data_cannot_decide_how_many_axes_there_are() -> None:
    text = "main (float[N] x) => (y) { i = Cast <to = 7> (x) y = ConstantOfShape (i) }"
    with pytest.raises(ModelImportError, match="depends on the value of input 'x'"):
        rlx.from_onnx(parse(text))


@pytest.mark.usefixtures("each_origin")
def test_sizes_that_data_decide_are_symbols() -> None:
    graph = rlx.from_onnx(parse("main (float[N] x) => (y) { i = NonZero (x) y = Transpose (i) }"))
    assert graph.outputs["y"].shape[1] == 1
    got = rlx.compile(graph)(np.array([0, 3, 0, 4], np.float32))
    assert got.tolist() == [[1], [3]]


# -- the evaluator itself


def evaluator() -> tuple[PartialEvaluator, Any]:
    graph = rlx.Graph("g")
    return PartialEvaluator(), graph


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda o, n: n + 2, N + 2),
        (lambda o, n: n * 3 - n, 2 * N),
        (lambda o, n: o.maximum(n, 4), None),
        (lambda o, n: o.equal(n, -1), False),
        (lambda o, n: o.greater_equal(n, 0), True),
        (lambda o, n: o.less(n, n + 1), True),
        (lambda o, n: o.not_equal(n, n), False),
        (lambda o, n: o.logical_or(o.equal(n, 5), o.greater(n, -1)), True),
        (lambda o, n: o.logical_and(o.equal(n, 5), o.equal(n, -1)), False),
        (lambda o, n: o.where(o.equal(n, -1), n + 1, n), N),
        (lambda o, n: o.abs(n), N),
        (lambda o, n: o.neg(o.neg(n)), N),
        (lambda o, n: o.pow(n, 2), N * N),
        (lambda o, n: o.cast(o.floor(o.cast(n, "f32") * 0.5), "i64"), N // 2),
        (lambda o, n: o.cast(o.cast(n, "f32") * 1.5, "i64"), (3 * N) // 2),
    ],
)
def test_elements(make: Any, want: Any) -> None:
    from rlx import ops

    known, graph = evaluator()
    with graph.building():
        n = ops.dim_value(N)
        found = known(make(ops, n))
    assert found is not None
    if want is not None:
        assert found.reshape(-1)[0] == want


def test_unknown_elements_do_not_hide_known_ones() -> None:
    from rlx import ops

    known, graph = evaluator()
    with graph.building():
        sizes = ops.concat([ops.reshape(ops.dim_value(d), (1,)) for d in (N, 7)])
        found = known(ops.equal(sizes, 7))
    assert found is not None and found[0] == Undecided(N, 7) and found[1] is True


def test_quotients_are_exact() -> None:
    from rlx import ops

    known, graph = evaluator()
    with graph.building():
        half = ops.cast(ops.dim_value(N), "f32") / 4.0
        found = known(half)
        back = known(half * 4.0)
        odd = known(ops.cast(ops.dim_value(N), "f32") * 0.1)
    assert found is not None and found[()] == Quotient(N, 4)
    assert back is not None and back[()] == N
    assert odd is not None and odd[()] == Scaled(N // 10, ceildiv(N, 10))  # no fraction, but rounds like one


def test_large_tensors_are_data() -> None:
    from rlx import ops

    known, graph = evaluator()
    with graph.building():
        assert known(ops.zeros((5000,)) + 1.0) is None
        assert known(ops.zeros((50,)) + 1.0) is not None


def test_reshape_with_two_unknowns_is_refused() -> None:
    with pytest.raises(RlxError, match="more than one -1"):
        rlx.from_onnx(
            parse("main (float[N] x) => (y) { s = Constant <value_ints = [-1, -1]> () y = Reshape (x, s) }")
        )
