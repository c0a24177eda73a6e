"""The store behind rlx.load: what was compiled once is found again, and only if nothing has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from stored_models import X, network, set_own_folders

import rlx
from machines import another
from rlx.backend.cpu import jit
from rlx.ir import serialize
from rlx.runtime import programs
from rlx.runtime.artifact import Artifact
from rlx.runtime.cache import CacheWarning
from rlx.runtime.native_code import prepare_runs
from rlx.runtime.programs import ProgramStore, wait_until_stored

own_folders = pytest.fixture(autouse=True)(set_own_folders)


@pytest.fixture
def onnx_file(tmp_path: Path, require) -> Path:  # type: ignore[no-untyped-def]
    require("onnx")
    import onnx

    weight = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["h"]), onnx.helper.make_node("Relu", ["h"], ["y"])],
        "small",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 40])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 8])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "small.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="small.bin", size_threshold=0)
    return path


def test_the_second_load_of_a_model_imports_no_frontend(onnx_file: Path) -> None:
    np.save(str(onnx_file) + ".npy", X)
    code = (
        "import sys, numpy as np, rlx\n"
        f"y = rlx.load({str(onnx_file)!r})(np.load({str(onnx_file) + '.npy'!r}))\n"
        "heavy = {'onnx', 'llvmlite', 'rlx.passes.fuse', 'rlx.backend.cpu.gemm'} & sys.modules.keys()\n"
        "print(y.tobytes().hex(), len(heavy))"
    )
    cold, warm = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
        for _ in range(2)
    )
    (result, loaded), (again, loaded_again) = cold.stdout.split(), warm.stdout.split()
    assert result == again and int(loaded) == 4 and int(loaded_again) == 0
    assert ProgramStore().info().entries == 1


def test_a_graph_in_a_file_is_compiled_once(tmp_path: Path) -> None:
    file = tmp_path / "network.graph"
    serialize.save(network(), file)
    first = rlx.load(file)(X)
    compiles = jit.llvm_compiles
    np.testing.assert_array_equal(rlx.load(file)(X), first)
    assert jit.llvm_compiles == compiles and ProgramStore().info().entries == 1


def test_what_is_stored_later_has_the_key_and_the_code_of_when_it_was_loaded(
    onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:  # another cache may have the code that runs programs
        earlier.setenv("RLX_CACHE", str(tmp_path / "earlier"))
        prepare_runs()
    moved = threading.Event()
    monkeypatch.setattr(programs, "_let_it_run_first", lambda program: moved.wait())
    rlx.load(onnx_file)
    compiles = jit.llvm_compiles
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("RLX_CACHE", str(tmp_path / "later"))
        elsewhere.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
        moved.set()
        wait_until_stored()
    assert jit.llvm_compiles == compiles and not (tmp_path / "later").exists()
    assert Artifact(next(ProgramStore().directory.iterdir())).is_trusted(0)


def test_a_program_stored_with_winograd_does_not_answer_without(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv("RLX_WINOGRAD", value)
        rlx.load(onnx_file)
    assert ProgramStore().info().entries == 2


def test_options_that_say_more_than_a_file_name_are_not_answered_from_the_store(onnx_file: Path) -> None:
    rlx.load(onnx_file)
    folder = onnx_file.with_name("stages")
    rlx.load(onnx_file, dump=folder)
    assert list(folder.glob("*-fuse.txt"))
    gate = rlx.cost.default_gate("cpu")
    np.testing.assert_array_equal(rlx.load(onnx_file, gate=gate, pins={})(X), rlx.load(onnx_file)(X))


def test_a_changed_model_is_compiled_anew(onnx_file: Path) -> None:
    first = rlx.load(onnx_file)(X)
    data = onnx_file.with_name("small.bin")
    weights = np.fromfile(data, np.float32)
    (-weights).tofile(data)
    os.utime(data, ns=(1, 1))  # even if the clock is coarse
    second = rlx.load(onnx_file)(X)
    assert not np.array_equal(first, second)
    onnx_file.write_bytes(onnx_file.read_bytes().replace(b"Relu", b"Sqrt"))
    assert np.isnan(rlx.load(onnx_file)(X)).any()


def test_options_have_programs_of_their_own(onnx_file: Path) -> None:
    name = another()
    rlx.load(onnx_file)
    assert rlx.load(onnx_file, target=name).lir.target == name
    assert rlx.load(onnx_file, shapes={"x": (2, 40)})(X[:2]).shape == (2, 8)
    assert rlx.load(onnx_file, threads=1).threads == 1
    assert ProgramStore().info().entries == 3
    rlx.load(onnx_file, assume={"n": 3}, cache=False)
    assert ProgramStore().info().entries == 3 == ProgramStore().clear()


def test_a_damaged_entry_is_replaced(onnx_file: Path) -> None:
    expected = rlx.load(onnx_file)(X)
    wait_until_stored()
    (entry,) = ProgramStore().directory.iterdir()
    entry.write_bytes(entry.read_bytes()[:5000])
    with pytest.warns(CacheWarning, match="compiled again"):
        assert np.array_equal(rlx.load(onnx_file)(X), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rlx.load(onnx_file)


def test_the_store_is_bounded(onnx_file: Path) -> None:
    program = rlx.load(onnx_file)
    size = ProgramStore().info().nbytes
    store = ProgramStore(limit=size * 5 // 2)
    for number in range(5):
        store.put(program, onnx_file, {"number": number})
    assert store.info().entries == 2
    assert store.find(onnx_file, {"number": 4}) is not None and store.find(onnx_file, {"number": 0}) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (onnx_file.parent / "file").write_text("")
    monkeypatch.setenv("RLX_CACHE", str(onnx_file.parent / "file"))
    with pytest.warns(CacheWarning, match="not stored"):
        assert rlx.load(onnx_file)(X).shape == (3, 8)


def test_graphs_from_files(tmp_path: Path) -> None:
    from rlx.ir.serialize import save as save_graph

    expected = rlx.compile(network())(X)
    save_graph(network(), tmp_path / "network.graph")
    assert np.array_equal(rlx.load(tmp_path / "network.graph")(X), expected)
    assert np.array_equal(rlx.Session(threads=1).load(tmp_path / "network.graph")(X), expected)
