"""Bad ONNX files: each mutation of a good model gives one clear error that names the thing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper, parser  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import ModelImportError, RlxError  # noqa: E402

GOOD = """
<ir_version: 9, opset_import: ["": 17]>
net (float[N, 3, 8, 8] x, float[N, 4] z) => (float[N, 2] y, int64[N] best)
<float[4, 3, 3, 3] w, float[4] b, float[8, 2] fc, float[2] fb = {0.5, 0.25}>
{
    [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
    [relu] r = Relu (c)
    [pool] p = GlobalAveragePool (r)
    [flat] f = Flatten (p)
    [join] j = Concat <axis = 1> (f, z)
    [fc1] m = MatMul (j, fc)
    [add] a = Add (m, fb)
    [axes] ax = Constant <value = int64[1] {1}> ()
    [top] s = Softmax <axis = -1> (a)
    [mean] mm = ReduceSum <keepdims = 1> (s, ax)
    [div] y = Div (s, mm)
    [arg] best = ArgMax <axis = 1, keepdims = 0> (y)
}
"""


def good() -> Any:
    model = parser.parse_model(GOOD)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 3, 3, 3)), ("b", (4,)), ("fc", (8, 2))):
        array = rng.standard_normal(shape).astype(np.float32)
        kept = [t for t in model.graph.initializer if t.name != name]
        del model.graph.initializer[:]
        model.graph.initializer.extend([*kept, numpy_helper.from_array(array, name)])
    return model


def node(model: Any, name: str) -> Any:
    return next(n for n in model.graph.node if n.name == name)


def weight(model: Any, name: str) -> Any:
    return next(t for t in model.graph.initializer if t.name == name)


def set_attr(proto: Any, name: str, value: Any) -> None:
    kept = [a for a in proto.attribute if a.name != name]
    del proto.attribute[:]
    proto.attribute.extend([*kept, helper.make_attribute(name, value)])


def test_the_good_model_is_good() -> None:
    graph = rlx.from_onnx(good())
    assert str(graph.outputs["y"].type) == "f32[N,2]"


Change = Callable[[Any], None]
MUTATIONS: dict[str, tuple[Change, str]] = {}


def mutation(match: str) -> Callable[[Change], Change]:
    """A change to the good model, and what the error must say."""

    def register(change: Change) -> Change:
        MUTATIONS[change.__name__] = (change, match)
        return change

    return register


# -- ops and attributes


@mutation(r"node 'relu' \(NoSuchOp, opset 17\): RLX does not support this op")
def unknown_op(m: Any) -> None:
    node(m, "relu").op_type = "NoSuchOp"


@mutation(r"node 'relu' \(Relu, opset 1\): RLX does not support this op")
def unknown_domain(m: Any) -> None:
    node(m, "relu").domain = "com.example"


@mutation("opset 99 is newer")
def future_opset(m: Any) -> None:
    m.opset_import[0].version = 99


@mutation("attribute 'wat' is not supported")
def unknown_attribute(m: Any) -> None:
    set_attr(node(m, "relu"), "wat", 1)


@mutation("auto_pad is 'SIDEWAYS'")
def unknown_word(m: Any) -> None:
    set_attr(node(m, "conv"), "auto_pad", "SIDEWAYS")


@mutation("node 'arg'.*axis 7 is out of range")
def axis_out_of_range(m: Any) -> None:
    set_attr(node(m, "arg"), "axis", 7)


@mutation("node 'join'.*axis -9 is out of range")
def negative_axis_out_of_range(m: Any) -> None:
    set_attr(node(m, "join"), "axis", -9)


@mutation("node 'join'.*it is not valid")
def attribute_of_the_wrong_kind(m: Any) -> None:
    set_attr(node(m, "join"), "axis", "one")


@mutation("node 'conv'.*3 pads for 2 axes")
def wrong_number_of_pads(m: Any) -> None:
    set_attr(node(m, "conv"), "pads", [1, 1, 1])


@mutation("node 'conv'")
def wrong_number_of_strides(m: Any) -> None:
    set_attr(node(m, "conv"), "strides", [1, 1, 1])


@mutation("node 'conv'")
def zero_strides(m: Any) -> None:
    set_attr(node(m, "conv"), "strides", [0, 0])


@mutation("node 'conv'")
def negative_dilations(m: Any) -> None:
    set_attr(node(m, "conv"), "dilations", [-1, 1])


@mutation("node 'conv'")
def groups_that_do_not_divide(m: Any) -> None:
    set_attr(node(m, "conv"), "group", 2)


@mutation("node 'conv'")
def no_groups(m: Any) -> None:
    set_attr(node(m, "conv"), "group", 0)


@mutation("kernel_shape")
def kernel_shape_that_disagrees(m: Any) -> None:
    set_attr(node(m, "conv"), "kernel_shape", [5, 5])


@mutation("node 'conv'")
def window_larger_than_the_image(m: Any) -> None:
    set_attr(node(m, "conv"), "dilations", [100, 100])


@mutation("node 'flat'")
def flatten_axis_out_of_range(m: Any) -> None:
    set_attr(node(m, "flat"), "axis", 12)


@mutation("node 'top'")
def softmax_axis_out_of_range(m: Any) -> None:
    set_attr(node(m, "top"), "axis", 5)


@mutation("it has no value")
def constant_without_value(m: Any) -> None:
    del node(m, "axes").attribute[:]


# -- wiring


@mutation("node 'relu'.*reads 'nowhere', which no input")
def missing_input(m: Any) -> None:
    node(m, "relu").input[0] = "nowhere"


@mutation("node 'relu'.*input 0 must be a tensor, but is nothing")
def empty_input(m: Any) -> None:
    node(m, "relu").input[0] = ""


@mutation("node 'add'.*input 1 must be a tensor")
def too_few_inputs(m: Any) -> None:
    del node(m, "add").input[1]


@mutation("circle: .*conv.*relu")
def cycle(m: Any) -> None:
    node(m, "conv").input[0] = "s"


@mutation("circle: node 'relu'")
def node_that_reads_itself(m: Any) -> None:
    node(m, "relu").input[0] = "r"


@mutation("defines 'c', which is defined already")
def name_defined_twice(m: Any) -> None:
    node(m, "relu").output[0] = "c"


@mutation("output 'ghost' is defined by no node")
def output_without_node(m: Any) -> None:
    m.graph.output[0].name = "ghost"


@mutation("outputs")
def too_many_outputs(m: Any) -> None:
    node(m, "relu").output.append("extra")


@mutation("declared twice")
def input_declared_twice(m: Any) -> None:
    m.graph.input.append(m.graph.input[0])


@mutation("holds no ONNX graph")
def no_nodes(m: Any) -> None:
    del m.graph.node[:], m.graph.output[:]


# -- types and shapes


@mutation("node 'conv'.*different dtypes|node 'conv'.*dtype")
def input_of_the_wrong_dtype(m: Any) -> None:
    m.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64


@mutation("element type 77")
def input_of_unknown_dtype(m: Any) -> None:
    m.graph.input[0].type.tensor_type.elem_type = 77


@mutation("no shape; give one")
def input_without_shape(m: Any) -> None:
    m.graph.input[0].type.tensor_type.ClearField("shape")


@mutation("input 'x': its type")
def input_without_type(m: Any) -> None:
    m.graph.input[0].ClearField("type")


@mutation("input 'x': its type map_type is not supported")
def input_that_is_a_map(m: Any) -> None:
    m.graph.input[0].type.map_type.key_type = TensorProto.INT64


@mutation("input 'x': it is a sequence")
def input_that_is_a_sequence(m: Any) -> None:
    kind = onnx.TypeProto()
    kind.sequence_type.elem_type.CopyFrom(m.graph.input[0].type)
    m.graph.input[0].type.CopyFrom(kind)


@mutation("input 'x': it holds text")
def input_that_is_text(m: Any) -> None:
    m.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


@mutation("node 'conv'")
def input_of_another_rank(m: Any) -> None:
    del m.graph.input[0].type.tensor_type.shape.dim[3]


@mutation("node 'conv'")
def input_with_other_channels(m: Any) -> None:
    m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5


@mutation("has more elements than RLX can count")
def huge_input(m: Any) -> None:
    m.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 2**61


@mutation("node 'fc1'")
def product_that_does_not_fit(m: Any) -> None:
    m.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 9


@mutation("node 'add'")
def sum_that_does_not_broadcast(m: Any) -> None:
    weight(m, "fb").CopyFrom(numpy_helper.from_array(np.zeros(3, np.float32), "fb"))


# -- weights


@mutation("initializer 'w'.*holds .*damaged")
def truncated_weight(m: Any) -> None:
    weight(m, "w").raw_data = weight(m, "w").raw_data[:-4]


@mutation("initializer 'w'.*holds .*damaged")
def weight_of_another_shape(m: Any) -> None:
    weight(m, "w").dims[0] = 5


@mutation("initializer 'w'.*negative size")
def weight_of_negative_size(m: Any) -> None:
    weight(m, "w").dims[0] = -4


@mutation("initializer 'w'.*damaged")
def weight_of_huge_size(m: Any) -> None:
    weight(m, "w").dims[0] = 2**60


@mutation("initializer 'w'.*element type 99")
def weight_of_unknown_dtype(m: Any) -> None:
    weight(m, "w").data_type = 99


@mutation("initializer 'w'.*element type 0")
def weight_of_undefined_dtype(m: Any) -> None:
    weight(m, "w").data_type = 0


@mutation("node 'conv'.*dtype")
def weight_of_the_wrong_dtype(m: Any) -> None:
    weight(m, "w").CopyFrom(numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float64), "w"))


@mutation("node 'conv'")
def weight_of_the_wrong_rank(m: Any) -> None:
    weight(m, "w").CopyFrom(numpy_helper.from_array(np.zeros((4, 3, 9), np.float32), "w"))


@mutation("initializer 'fb'.*holds 1")
def weight_with_too_few_numbers(m: Any) -> None:
    del weight(m, "fb").float_data[1]


@mutation("keeps its data in the file")
def external_weight_of_a_proto(m: Any) -> None:
    tensor = weight(m, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")


@mutation("cannot be stored densely")
def huge_sparse_weight(m: Any) -> None:
    values = numpy_helper.from_array(np.array([1], np.float32), "sparse")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([0])), [2**40])
    m.graph.sparse_initializer.append(sparse)


@mutation("indices outside")
def sparse_weight_with_wild_indices(m: Any) -> None:
    values = numpy_helper.from_array(np.array([1], np.float32), "sparse")
    m.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([99])), [4])
    )


# -- shapes that nodes compute


def before_flatten(m: Any, op: str, shape: list[int], **attrs: Any) -> None:
    """Replace the Flatten node by an op with a constant shape operand."""
    m.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), "target"))
    flat = node(m, "flat")
    flat.op_type = op
    flat.input.append("target")
    for key, value in attrs.items():
        set_attr(flat, key, value)


@mutation("node 'flat'.*elements")
def reshape_to_another_size(m: Any) -> None:
    before_flatten(m, "Reshape", [3, 5, 7])


@mutation("more than one -1")
def reshape_with_two_open_sizes(m: Any) -> None:
    before_flatten(m, "Reshape", [-1, -1])


@mutation("sizes are -1, 0 or more")
def reshape_to_negative_size(m: Any) -> None:
    before_flatten(m, "Reshape", [-5, 4])


@mutation("copies an axis that")
def reshape_that_copies_too_much(m: Any) -> None:
    before_flatten(m, "Reshape", [1, 1, 1, 1, 1, 0])


@mutation("node 'flat'")
def expand_to_less(m: Any) -> None:
    before_flatten(m, "Expand", [3, 3, 3])


@mutation("has more elements than RLX can count")
def tile_without_end(m: Any) -> None:
    before_flatten(m, "Tile", [1, 2**30, 2**30, 1])


@mutation("node 'flat'")
def pad_by_too_few_numbers(m: Any) -> None:
    before_flatten(m, "Pad", [1, 1, 1])


@mutation("node 'flat'")
def squeeze_of_an_axis_that_is_not_one(m: Any) -> None:
    before_flatten(m, "Squeeze", [1])


@mutation("name an axis twice|axis")
def unsqueeze_twice(m: Any) -> None:
    before_flatten(m, "Unsqueeze", [1, 1])


@mutation("node 'mean'.*axis 9")
def reduce_axis_out_of_range(m: Any) -> None:
    node(m, "axes").attribute[0].t.CopyFrom(numpy_helper.from_array(np.array([9])))


@mutation("depends on the value of input 'sz'")
def shape_from_an_input(m: Any) -> None:
    m.graph.input.append(helper.make_tensor_value_info("sz", TensorProto.INT64, [2]))
    flat = node(m, "flat")
    flat.op_type = "Reshape"
    flat.input.append("sz")


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name: str) -> None:
    change, match = MUTATIONS[name]
    model = good()
    change(model)
    with pytest.raises(ModelImportError, match=match) as refused:
        rlx.from_onnx(model.SerializeToString())
    assert str(refused.value).startswith(("model 'net' cannot be imported", "the model"))


def test_there_are_enough_mutations() -> None:
    assert len(MUTATIONS) >= 60


def test_all_problems_are_listed_at_once() -> None:
    model = good()
    for name in ("conv", "relu", "fc1"):
        node(model, name).op_type = "Missing" + name
    set_attr(node(model, "arg"), "wat", 1)
    with pytest.raises(ModelImportError) as refused:
        rlx.from_onnx(model)
    text = str(refused.value)
    assert all(f"Missing{name}" in text for name in ("conv", "relu", "fc1"))
    assert text.count("\n  - ") == 3  # the ArgMax after them is not reached


def test_problems_in_branches_are_listed() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]> net (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = yes () => (float[2] a) { a = Nope (x) },
                    else_branch = no () => (float[2] b) { b = Nada (x) }> }"""
    with pytest.raises(ModelImportError, match=r"inside its sub-graph: node 'a' .Nope"):
        rlx.from_onnx(parser.parse_model(text))


# -- files


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"cannot read the model .*No such file"):
        rlx.from_onnx(tmp_path / "none.onnx")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"cannot read the model"):
        rlx.from_onnx(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"hello, this is text", b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_a_file_of_another_kind(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelImportError, match=r"not an ONNX model|holds no ONNX graph|is empty"):
        rlx.from_onnx(path)


def test_something_that_is_no_model() -> None:
    with pytest.raises(
        ModelImportError, match="takes a path, bytes, a ModelProto or an ONNXProgram, not int"
    ):
        rlx.from_onnx(7)


def save_external(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(good(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def test_missing_external_data(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelImportError, match=r"needs the file '.*w.bin', which is not there"):
        rlx.from_onnx(path)


def test_truncated_external_data(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    data = tmp_path / "w.bin"
    data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(ModelImportError, match="do not belong together"):
        rlx.from_onnx(path)


def test_external_data_outside_of_the_folder(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    weight(model, "w").external_data[0].value = "../../etc/passwd"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelImportError, match="points outside the folder"):
        rlx.from_onnx(path)


def test_functions_that_multiply_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.frontend.onnx.importer.MOST_NODES", 5000)
    levels = "\n".join(
        f'<domain: "local", opset_import: ["": 17, "local": 1]> f{i} (a) => (b) {{ '
        + " ".join(f"t{k} = local.f{i + 1} (a)" for k in range(30))
        + " b = Identity (a) }"
        for i in range(8)
    )
    text = f"""<ir_version: 9, opset_import: ["": 17, "local": 1]>
        net (float[2] x) => (float[2] y) {{ y = local.f0 (x) }}
        {levels} <domain: "local", opset_import: ["": 17]> f8 (a) => (b) {{ b = Identity (a) }}"""
    with pytest.raises(ModelImportError, match="unfolds to more than"):
        rlx.from_onnx(parser.parse_model(text))


# -- fuzz


def survive(data: bytes) -> None:
    """A damaged file is imported or refused, nothing else."""
    try:
        rlx.from_onnx(data)
    except RlxError as e:
        assert str(e)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes(seed: int) -> None:
    rng = random.Random(seed)
    data = good().SerializeToString()
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        survive(bytes(damaged))
        survive(data[: rng.randrange(len(data))])


@pytest.mark.parametrize("seed", range(8))
def test_damaged_graphs(seed: int) -> None:
    """Valid files with senseless wiring and attributes."""
    rng = random.Random(seed)
    for _ in range(25):
        model = good()
        names = [o for n in model.graph.node for o in n.output] + ["x", "z", "w", "fc", ""]
        for n in rng.sample(list(model.graph.node), 3):
            others = ["Reshape", "Slice", "Gather", "Concat", "Conv", "Gemm", "TopK", "Pad", "Loop"]
            n.op_type = rng.choice([*others, n.op_type])
            for i in range(len(n.input)):
                if rng.random() < 0.5:
                    n.input[i] = rng.choice(names)
            for a in n.attribute:
                a.i = rng.choice([-1, 0, 7, 2**62])
                for i in range(len(a.ints)):
                    a.ints[i] = rng.choice([-1, 0, 3, 2**40])
        survive(model.SerializeToString())
