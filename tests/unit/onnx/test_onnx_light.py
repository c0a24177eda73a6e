"""ONNX files are read without their weights, which come from the file when tensors need them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.errors import ModelImportError
from rlx.frontend.onnx.lazy_weights import LEAST_BYTES, read_light
from rlx.frontend.onnx.load import external_files, load_model
from rlx.frontend.onnx.proto import tensor_array

onnx = pytest.importorskip("onnx")

SIZE = LEAST_BYTES // 4
WEIGHTS = {
    "small": np.arange(3, dtype=np.float32),
    "large": np.arange(SIZE, dtype=np.float32),
    "bytes": np.arange(2 * LEAST_BYTES, dtype=np.int64).astype(np.int8),
    "typed": np.arange(SIZE, dtype=np.int64),
}


def model() -> onnx.ModelProto:
    """x + large, and tensors that are stored in other ways."""
    tensors = [onnx.numpy_helper.from_array(v, k) for k, v in WEIGHTS.items() if k != "typed"]
    tensors.append(onnx.helper.make_tensor("typed", 7, [SIZE], WEIGHTS["typed"].tolist()))
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "large"], ["y"])],
        "light",
        [info("x", 1, [SIZE])],
        [info("y", 1, [SIZE])],
        tensors,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model().SerializeToString())
    return path


def test_large_tensors_stay_in_the_file_and_everything_else_is_as_it_was(file: Path) -> None:
    data = read_light(file)
    assert data is not None
    inline = WEIGHTS["typed"].size * 8
    assert len(data) < file.stat().st_size - WEIGHTS["large"].nbytes - WEIGHTS["bytes"].nbytes + 1000
    assert len(data) > inline / 4  # typed fields are not raw data
    proto, folder = load_model(file)
    assert folder is not None and external_files(proto, folder) == []
    there = {t.name: t for t in proto.graph.initializer}
    assert {n for n, t in there.items() if t.data_location} == {"large", "bytes"}
    for name, value in WEIGHTS.items():
        found = tensor_array(there[name], folder)
        np.testing.assert_array_equal(found, value)
        assert found.dtype == value.dtype and found.flags.aligned and found.flags.writeable
    whole = model()
    for t in (*proto.graph.initializer, *whole.graph.initializer):
        for field in ("raw_data", "external_data", "data_location"):
            t.ClearField(field)
    assert proto == whole


@pytest.mark.usefixtures("each_origin")
def test_a_model_runs_from_its_file_as_from_its_bytes(file: Path) -> None:
    x = np.linspace(0, 1, SIZE, dtype=np.float32)
    from_file, from_bytes = (rlx.compile(rlx.from_onnx(m))(x) for m in (file, file.read_bytes()))
    np.testing.assert_array_equal(from_file, x + WEIGHTS["large"])
    np.testing.assert_array_equal(from_file, from_bytes)
    file.write_bytes(b"another")  # a program has its weights in memory
    np.testing.assert_array_equal(rlx.compile(rlx.from_onnx(model()))(x), from_bytes)


@pytest.mark.usefixtures("each_origin")
def test_a_link_into_another_folder_is_read_whole(file: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "linked.onnx"
    link.symlink_to(file)
    assert read_light(link) is None
    beside = tmp_path / "beside.onnx"
    beside.symlink_to(file)
    assert read_light(beside) is not None
    x = np.zeros(SIZE, np.float32)
    for path in (link, beside):
        np.testing.assert_array_equal(rlx.compile(rlx.from_onnx(path))(x), WEIGHTS["large"])


def test_a_file_that_changes_while_it_is_read_is_refused(file: Path) -> None:
    loaded = load_model(file)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ModelImportError, match="has changed while it was read; load it again"):
        rlx.from_onnx(loaded)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_left_to_protobuf(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    assert read_light(file) is None
    with pytest.raises(ModelImportError, match="not an ONNX model or is truncated"):
        rlx.from_onnx(file)


def test_data_that_does_not_fit_its_shape_is_named_as_before(file: Path) -> None:
    broken = model()
    broken.graph.initializer[1].dims[0] = SIZE - 1
    file.write_bytes(broken.SerializeToString())
    with pytest.raises(ModelImportError, match=f"'large' is f32.*{SIZE * 4 - 4} bytes, but holds {SIZE * 4}"):
        rlx.from_onnx(file)


def test_tensors_with_data_in_two_places_are_left_to_protobuf(file: Path) -> None:
    broken = model()
    broken.graph.initializer[1].external_data.add(key="location", value="w.bin")
    file.write_bytes(broken.SerializeToString())
    assert read_light(file) is None
