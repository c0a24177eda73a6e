"""How ONNX models become graphs: weights, functions, sub-graphs, versions, external data, structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper, parser  # noqa: E402

import rlx  # noqa: E402
from rlx import onnx_backend  # noqa: E402
from rlx.errors import ModelImportError  # noqa: E402
from rlx.frontend.onnx.call import NeedsValue  # noqa: E402
from rlx.frontend.onnx.importer import import_model  # noqa: E402
from rlx.frontend.onnx.registry import entries, find  # noqa: E402
from rlx.reference.interpreter import evaluate  # noqa: E402


def parse(text: str, opset: int = 17) -> Any:
    """A model from ONNX's text form."""
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}, "local": 1]> {text}')


def run(model: Any, **inputs: np.ndarray) -> list[np.ndarray]:
    return list(onnx_backend.prepare(model).run(inputs))


# -- weights


def with_weight(array: np.ndarray, as_node: bool) -> Any:
    """y = x + w, with w as an initializer or from a Constant node."""
    tensor = numpy_helper.from_array(array, "w")
    nodes = [helper.make_node("Constant", [], ["w"], value=tensor)] if as_node else []
    nodes.append(helper.make_node("Add", ["x", "w"], ["y"]))
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    info = [helper.make_tensor_value_info(n, kind, array.shape) for n in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], [] if as_node else [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("as_node", [False, True])
def test_large_constants_are_params_and_small_ones_constants(as_node: bool) -> None:
    large = rlx.from_onnx(with_weight(np.arange(256, dtype=np.float32), as_node))
    assert list(large.params) == ["w"]
    np.testing.assert_array_equal(large.param_values["w"], np.arange(256, dtype=np.float32))
    assert not rlx.from_onnx(with_weight(np.arange(255, dtype=np.float32), as_node)).params


def test_weights_that_nothing_reads_are_left_out() -> None:
    model = with_weight(np.zeros(256, np.float32), False)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(999, np.float32), "unused"))
    assert list(rlx.from_onnx(model).params) == ["w"]


@pytest.mark.parametrize("name", ["i4", "u4", "f8e4m3fn", "bf16", "bool", "i8", "f16", "f64", "u32"])
@pytest.mark.parametrize("raw", [True, False])
def test_tensors_of_every_dtype(name: str, raw: bool) -> None:
    from rlx.frontend.onnx.proto import NUMBERS, tensor_array
    from rlx.ir.dtype import convert, dtype

    want = convert(np.array([0, 1, 1, 0, 1]), dtype(name))
    number = NUMBERS[dtype(name)]
    if raw:
        tensor = numpy_helper.from_array(want, "t")
        assert tensor.data_type == number
    else:
        tensor = helper.make_tensor("t", number, [5], [0, 1, 1, 0, 1])
    got = tensor_array(tensor)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_external_data(tmp_path: Path) -> None:
    weight = np.arange(300, dtype=np.float32)
    model = with_weight(weight, False)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = rlx.from_onnx(path)
    np.testing.assert_array_equal(graph.param_values["w"], weight)


def test_external_data_needs_a_place_to_look(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        with_weight(np.zeros(300, np.float32), False), path, save_as_external_data=True, size_threshold=0
    )
    with pytest.raises(ModelImportError, match="give from_onnx the path"):
        rlx.from_onnx(onnx.load(path, load_external_data=False))


def test_sparse_initializer_becomes_dense() -> None:
    values = numpy_helper.from_array(np.array([5, 7], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 3])), [4])
    model = with_weight(np.zeros(4, np.float32), False)
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(sparse)
    (y,) = run(model, x=np.zeros(4, np.float32))
    assert y.tolist() == [0, 5, 0, 7]


# -- functions and sub-graphs


def test_local_functions_with_attributes() -> None:
    model = parse(
        """
        main (float[N] x) => (float[N] y) { y = local.twice <slope = 0.5> (x) }
        <domain: "local", opset_import: ["": 17, "local": 1]>
        once <slope> (a) => (b) { b = LeakyRelu <alpha: float = @slope> (a) }
        <domain: "local", opset_import: ["": 17, "local": 1]>
        twice <slope> (a) => (c) {
            b = local.once <slope: float = @slope> (a)
            c = local.once <slope: float = @slope> (b)
        }
        """
    )
    (y,) = run(model, x=np.array([-4.0, 2.0], np.float32))
    assert y.tolist() == [-1.0, 2.0]


def test_a_function_that_calls_itself_is_refused() -> None:
    model = parse(
        """
        main (float[N] x) => (float[N] y) { y = local.f (x) }
        <domain: "local", opset_import: ["": 17, "local": 1]> f (a) => (b) { b = local.f (a) }
        """
    )
    with pytest.raises(ModelImportError, match="calls itself"):
        rlx.from_onnx(model)


def test_ops_without_an_entry_use_the_definition_of_their_schema() -> None:
    assert find("", "SwiGLU", 28) is None
    x = np.array([[1.0, -2.0, 0.5, 3.0]], np.float32)
    model = parse("main (float[1, 4] x, float[1, 4] g) => (y) { y = SwiGLU (x, g) }", 28)
    schema = onnx.defs.get_schema("SwiGLU", 28)
    assert schema.has_function
    (y,) = run(model, x=x, g=x)
    from onnx.reference import ReferenceEvaluator

    (want,) = ReferenceEvaluator(model).run(None, {"x": x, "g": x})
    np.testing.assert_allclose(y, want, rtol=1e-6)


IF = """
main (bool c, float[N] x) => (float[N] y) {
    y = If (c) <then_branch = yes () => (float[N] a) { a = Add (x, x) },
                else_branch = no () => (float[N] b) { b = Neg (x) }>
}
"""


def test_if_reads_values_around_it() -> None:
    model, x = parse(IF), np.array([1.0, 2.0], np.float32)
    assert run(model, c=np.array(True), x=x)[0].tolist() == [2, 4]
    assert run(model, c=np.array(False), x=x)[0].tolist() == [-1, -2]


def test_an_if_that_is_known_leaves_one_branch() -> None:
    model = parse(IF)
    model.graph.initializer.append(numpy_helper.from_array(np.array(False), "c"))
    del model.graph.input[0]
    graph = rlx.from_onnx(model)
    assert [n.op.name for n in graph.nodes] == ["input", "neg"]


LOOP = """
main (int64 trips, float[2] x) => (float[2] last, float[T, 2] all) {
    go = Constant <value = bool {1}> ()
    last, all = Loop (trips, go, x) <
        body = step (int64 i, bool g, float[2] a) => (bool h, float[2] b, float[2] s) {
        h = Identity (g)
        b = Add (a, x)
        s = Mul (a, a)
    }>
}
"""


@pytest.mark.parametrize("fixed", [True, False])
def test_loop(fixed: bool) -> None:
    """Known trips are written out; unknown ones are a loop of the program."""
    model, x = parse(LOOP), np.array([1.0, 2.0], np.float32)
    inputs: dict[str, Any] = {"x": x}
    if fixed:
        model.graph.initializer.append(numpy_helper.from_array(np.array(3), "trips"))
        del model.graph.input[0]
        graph = rlx.from_onnx(model)
        assert "loop" not in {n.op.name for n in graph.nodes}
    else:
        inputs["trips"] = np.array(3)
        assert "loop" in {n.op.name for n in rlx.from_onnx(model).nodes}
    last, rows = run(model, **inputs)
    assert last.tolist() == [4, 8]
    assert rows.tolist() == [[1, 4], [4, 16], [9, 36]]


def test_scan_over_a_symbolic_length() -> None:
    model = parse(
        """
        main (float[T, 3] x, float[3] s) => (float[3] total, float[T, 3] sums) {
            total, sums = Scan <num_scan_inputs = 1,
                body = step (float[3] a, float[3] r) => (float[3] b, float[3] c) {
                b = Add (a, r)
                c = Identity (b)
            }> (s, x)
        }
        """
    )
    graph = rlx.from_onnx(model)
    assert str(graph.outputs["sums"].type) == "f32[T,3]"
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    out = evaluate(graph, {"x": x, "s": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(out["sums"], np.cumsum(x, 0))
    np.testing.assert_array_equal(out["total"], x.sum(0))


# -- versions


def test_the_newest_entry_of_an_opset_is_taken() -> None:
    softmax = {v: find("", "Softmax", v) for v in (1, 12, 13, 28)}
    assert softmax[1] is softmax[12] and softmax[13] is softmax[28] and softmax[12] is not softmax[13]


@pytest.mark.parametrize(("opset", "want"), [(12, [0.25] * 4), (13, [0.5] * 4)])
def test_softmax_changed_its_axes(opset: int, want: list[float]) -> None:
    model = parse("main (float[1, 2, 2] x) => (float[1, 2, 2] y) { y = Softmax <axis = 1> (x) }", opset)
    (y,) = run(model, x=np.zeros((1, 2, 2), np.float32))
    assert y.reshape(-1).tolist() == want


def test_every_entry_names_a_real_op() -> None:
    known = {(s.domain, s.name) for s in onnx.defs.get_all_schemas_with_history()}
    unknown = [e for e in entries() if e.domain != "com.microsoft" and (e.domain, e.op) not in known]
    assert [e.op for e in unknown] == [
        "SimplifiedLayerNormalization"
    ]  # ONNX Runtime puts it in ONNX's domain


def test_every_version_of_an_op_has_an_entry_or_a_definition() -> None:
    """Ops of ONNX that have an entry have one for every version since opset 7."""
    missing = []
    for s in onnx.defs.get_all_schemas_with_history():
        has_entry = any(e.op == s.name and e.domain == s.domain for e in entries())
        if (
            has_entry
            and not s.deprecated
            and s.since_version >= 7
            and find(s.domain, s.name, s.since_version) is None
        ):
            missing.append((s.domain, s.name, s.since_version))
    assert not missing


# -- structure: sequences, optionals, text, values that decide shapes


def test_sequences_and_optionals_cost_nothing_in_the_program() -> None:
    model = parse(
        """
        main (float[2] a, float[2] b) => (float[4] y, int64 n) {
            s = SequenceConstruct (a, b)
            n = SequenceLength (s)
            y = ConcatFromSequence <axis = 0> (s)
        }
        """
    )
    graph = rlx.from_onnx(model)
    assert {n.op.name for n in graph.nodes} == {"input", "concat", "constant"}


def test_a_shape_that_is_an_input_needs_its_value() -> None:
    model = parse("main (float[2, 3] x, int64[2] shape) => (float[A, B] y) { y = Reshape (x, shape) }")
    with pytest.raises(NeedsValue, match="depends on the value of input 'shape'") as refused:
        rlx.from_onnx(model)
    assert refused.value.inputs == ("shape",)
    graph = rlx.from_onnx(model, values={"shape": np.array([3, 2])})
    assert str(graph.outputs["y"].type) == "f32[3,2]"
    rep = onnx_backend.prepare(model)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for shape in ([3, 2], [6, 1], [3, 2]):
        assert rep.run([x, np.array(shape)])[0].shape == tuple(shape)
    assert len(rep.model.variants) == 2


def test_text_is_read_while_importing() -> None:
    model = parse("main (string[2] x) => (string[2] y) { y = StringConcat (x, x) }", 20)
    rep = onnx_backend.prepare(model)
    assert rep.run([np.array(["a", "b"], dtype=object)])[0].tolist() == ["aa", "bb"]
    assert [t["op"] for t in rep.host_thunks] == ["StringConcat"]


def test_sequence_inputs_and_outputs() -> None:
    nodes = "t = SequenceErase (s) n = SequenceLength (t)"
    model = parse(f"main (seq(float[N]) s) => (seq(float[M]) t, int64 n) {{ {nodes} }}")
    a, b = np.ones(2, np.float32), np.zeros(3, np.float32)
    out = onnx_backend.prepare(model).run([[a, b]])
    assert len(out[0]) == 1 and out[0][0].tolist() == [1, 1] and int(out[1]) == 1


def test_shapes_replace_declared_ones() -> None:
    model = parse("main (float[N] x) => (float[N] y) { y = Relu (x) }")
    assert str(rlx.from_onnx(model, shapes={"x": (3,)}).outputs["y"].type) == "f32[3]"


# -- the backend interface


def test_run_node() -> None:
    node = helper.make_node("Add", ["a", "b"], ["c"])
    out = onnx_backend.run_node(node, [np.ones(2, np.float32), np.ones(2, np.float32)])
    assert out[0].tolist() == [2, 2]


def test_devices() -> None:
    assert onnx_backend.supports_device("CPU") and not onnx_backend.supports_device("CUDA:1")
    with pytest.raises(rlx.errors.DeviceError, match="CUDA"):
        onnx_backend.prepare(parse("main (float[N] x) => (float[N] y) { y = Relu (x) }"), "CUDA")


def test_outputs_have_names() -> None:
    out = onnx_backend.run_model(with_weight(np.ones(2, np.float32), False), [np.ones(2, np.float32)])
    assert out["y"].tolist() == [2, 2]


def test_scalars_of_numpy_are_taken() -> None:
    model = parse("main (float x) => (float y) { y = Neg (x) }")
    assert float(onnx_backend.run_model(model, [np.float32(2)])[0]) == -2


def test_gradient_op() -> None:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y", "d")]
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["y"]),
        helper.make_node("Gradient", ["x"], ["d"], domain="ai.onnx.preview.training", xs=["x"], y="y"),
    ]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 12), helper.make_opsetid("ai.onnx.preview.training", 1)]
    _, d = run(
        helper.make_model(graph, opset_imports=opsets, ir_version=8), x=np.array([1.0, 3.0], np.float32)
    )
    assert d.tolist() == [2, 6]


def test_imported_knows_its_structure() -> None:
    model = parse("main (optional(float[2]) x) => (bool y) { y = OptionalHasElement (x) }", 18)
    assert import_model(model, {"x": None}).inputs == {"x": None}
    assert import_model(model, {"x": np.zeros(2, np.float32)}).inputs == {"x": "x"}


# -- sizes that are open


def range_up_to_a_size(start: float) -> Any:
    """As YOLO's anchors are written: Range(start, float(width), 1.0)."""
    return parse(f"""g (float[w] x) => (float[n] y) {{
        s = Shape(x)
        axis = Constant<value_ints: ints = [0]>()
        one = Squeeze(s, axis)
        limit = Cast<to = 1>(one)
        start = Constant<value_float: float = {start}>()
        step = Constant<value_float: float = 1.0>()
        y = Range(start, limit, step)
    }}""")


def test_a_range_of_floats_up_to_a_size() -> None:
    for width in (5, 8):
        got = run(range_up_to_a_size(0.0), x=np.zeros(width, np.float32))[0]
        np.testing.assert_array_equal(got, np.arange(width))


def test_a_range_that_mixes_sizes_and_fractions_is_refused() -> None:
    with pytest.raises(ModelImportError, match="mixes sizes with fractions"):
        import_model(range_up_to_a_size(0.5))


@pytest.mark.usefixtures("each_origin")
def test_a_slice_whose_sign_sizes_decide_counts_from_the_start() -> None:
    model = parse("""g (float[n] x) => (float[m] y) {
        s = Shape(x)
        three = Constant<value_ints: ints = [3]>()
        zero = Constant<value_ints: ints = [0]>()
        end = Sub(s, three)
        y = Slice(x, zero, end, zero)
    }""")
    program = rlx.compile(rlx.from_onnx(model))
    np.testing.assert_array_equal(program(np.arange(5, dtype=np.float32)), [0, 1])
    assert program(np.zeros(3, np.float32)).shape == (0,)
    with pytest.raises(rlx.errors.GuardError, match="n-3 is at least 0"):
        program(np.zeros(2, np.float32))


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("inside", [False, True])
def test_windows_that_do_not_fit_are_refused_by_the_size(inside: bool) -> None:
    """A window of 320 samples: sizes assumed while compiling grow until it fits, also inside a branch."""
    conv = "y = Conv<strides = [160]>(x, w)"
    if inside:
        conv = """zero = Constant<value_float: float = 0.0>()
        first = ReduceMax<keepdims = 0>(x)
        condition = Greater(first, zero)
        y = If (condition) <
            then_branch = a () => (float[b, 2, m] p) { p = Conv<strides = [160]>(x, w) },
            else_branch = b () => (float[b, 2, m] q) { t = Conv<strides = [160]>(x, w) q = Neg(t) }
        >"""
    text = f"g (float[b, 1, n] x) => (float[b, 2, m] y) <float[2, 1, 320] w> {{ {conv} }}"
    model = parse(text)
    weight = np.random.default_rng(0).standard_normal((2, 1, 320)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    del model.graph.value_info[:]
    program = rlx.compile(rlx.from_onnx(model))
    x = np.random.default_rng(1).standard_normal((1, 1, 700)).astype(np.float32)
    got = np.asarray(program(x))
    want = np.stack([x[0, 0, i : i + 320] @ weight[:, 0].T for i in (0, 160, 320)], 1)[None]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(rlx.errors.GuardError, match="n is at least 160"):
        program(x[..., :100])


def test_a_model_in_the_format_of_another_runtime_is_named() -> None:
    with pytest.raises(ModelImportError, match="ONNX Runtime's own format"):
        import_model(b"\x00\x01\x00\x00ORTM" + bytes(64))


@pytest.mark.usefixtures("each_origin")
def test_a_branch_that_is_not_taken_may_assume_other_sizes() -> None:
    """As a detector for two rates: the rate is data, and each branch squeezes if one frame is left."""

    def branch(name: str, length: int) -> str:
        return f"""{name}_branch = {name} () => (float[b] {name}_out) {{
            {name}_axes = Constant<value_ints: ints = [1]>()
            {name}_by = Constant<value_ints: ints = [{length}]>()
            {name}_shape = Shape(x)
            {name}_size = Gather<axis = 0>({name}_shape, {name}_axes)
            {name}_single = Equal({name}_size, {name}_by)
            {name}_wide = ReduceMean<axes = [1], keepdims = 1>(x)
            {name}_made = If ({name}_single) <
                then_branch = {name}_yes () => (float[b] {name}_s) {{
                    {name}_s = Squeeze({name}_wide, {name}_axes)
                }},
                else_branch = {name}_no () => (float[b, 1] {name}_k) {{ {name}_k = Identity({name}_wide) }}
            >
            {name}_factor = Constant<value_float: float = {length}.0>()
            {name}_out = Mul({name}_made, {name}_factor)
        }}"""

    model = parse(f"""g (float[b, n] x, int64 rate) => (float[b] y) {{
        wanted = Constant<value_int: int = 16>()
        condition = Equal(rate, wanted)
        y = If (condition) < {branch("then", 6)}, {branch("else", 3)} >
    }}""")
    program = rlx.compile(rlx.from_onnx(model))
    for size, rate in ((6, 16), (3, 8)):
        x = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        np.testing.assert_allclose(program(x, np.array(rate)), x.sum(1), rtol=1e-6)
        with pytest.raises(rlx.errors.KernelError, match="a branch that assumes other sizes"):
            program(x, np.array(24 - rate))
    with pytest.raises(rlx.errors.GuardError, match="n=5"):
        program(np.zeros((2, 5), np.float32), np.array(16))


@pytest.mark.usefixtures("each_origin")
def test_a_squeeze_without_axes_never_keeps_an_axis_of_one() -> None:
    """A batch of one is dropped, as in ONNX Runtime: the slice cuts features. Other sizes are refused."""
    model = parse("""g (float[batch, t, 4] x) => (float[n] y) {
        axes = Constant<value_ints: ints = [1]>()
        mean = ReduceMean<axes = [1], keepdims = 0>(x)
        flat = Squeeze(mean)
        zero = Constant<value_ints: ints = [0]>()
        two = Constant<value_ints: ints = [2]>()
        y = Slice(flat, zero, two, zero)
    }""")
    program = rlx.compile(rlx.from_onnx(model))
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    np.testing.assert_allclose(program(x), x.mean(1)[0, :2])
    with pytest.raises(rlx.errors.GuardError, match="batch equals 1"):
        program(np.repeat(x, 2, 0))


@pytest.mark.usefixtures("each_origin")
def test_a_squeeze_without_axes_keeps_a_length() -> None:
    model = parse("g (float[1, t] x) => (float[t] y) { y = Squeeze(x) }")
    program = rlx.compile(rlx.from_onnx(model))
    np.testing.assert_array_equal(program(np.ones((1, 3), np.float32)), np.ones(3))
    with pytest.raises(rlx.errors.GuardError, match="t is at least 2"):
        program(np.ones((1, 1), np.float32))


@pytest.mark.usefixtures("each_origin")
def test_axes_that_share_a_name_by_mistake_are_named_apart() -> None:
    """Exporters call axes of different inputs alike; the message says how to load such a model."""
    text = (
        "main (float[B, W] x, int64[B, W] at) => (float[B, W] y, int64[B, W] z) { y = Neg (x) z = Neg (at) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    feeds = {"x": np.ones((1, 6), np.float32), "at": np.ones((1, 2), np.int64)}
    with pytest.raises(rlx.errors.InputError) as refused:
        rlx.compile(rlx.from_onnx(model)).run(feeds)
    assert "shapes={'at': ['B', 'W here']}" in str(refused.value)
    out = rlx.compile(rlx.from_onnx(model, shapes={"at": ["B", "W here"]})).run(feeds)
    assert out["z"].tolist() == [[-1, -1]]


# -- padding


@pytest.mark.parametrize("value", [0, 1.5, 2 - 3j])
def test_padding_of_complex_numbers(value: complex) -> None:
    """A fill that is a complex number, real or not."""
    fill = numpy_helper.from_array(np.array(value, np.complex64), "fill")
    pads = numpy_helper.from_array(np.array([1, 2]), "pads")
    info = [
        helper.make_tensor_value_info(n, TensorProto.COMPLEX64, shape)
        for n, shape in (("x", [2]), ("y", [5]))
    ]
    graph = helper.make_graph(
        [helper.make_node("Pad", ["x", "pads", "fill"], ["y"])], "g", info[:1], info[1:], [pads, fill]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    x = np.array([1 + 2j, 3 - 1j], np.complex64)
    np.testing.assert_array_equal(run(model, x=x)[0], np.pad(x, (1, 2), constant_values=value))
