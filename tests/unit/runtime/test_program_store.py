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
from rlx.api import session
from rlx.codegen.native import jit
from rlx.files import UNFINISHED, identity
from rlx.frontend import onnx as onnx_frontend
from rlx.ir.text import files as serialize
from rlx.runtime.native_code import prepare_runs
from rlx.runtime.store import programs
from rlx.runtime.store.artifact import Artifact
from rlx.runtime.store.cache import CacheWarning, default_cache
from rlx.runtime.store.programs import ProgramStore, wait_until_stored
from rlx.system import SYSTEM

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
        "heavy = {'onnx', 'llvmlite', 'rlx.fuse.grow', 'rlx.codegen.cpu.product.gemm'} & sys.modules.keys()\n"
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
    program = rlx.load(file)
    first = program(X)
    wait_until_stored()  # with the best code, and code that guards its weights
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
    monkeypatch.setattr(programs, "let_run_first", lambda has_run: moved.wait())
    rlx.load(onnx_file).wait_for_code()
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


@pytest.mark.parametrize("changed", ["small.onnx", "small.bin"])
@pytest.mark.parametrize("moment", ["read", "compiled", "stored"])
def test_a_model_that_is_replaced_while_it_is_loaded_is_not_stored(
    onnx_file: Path, changed: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old program was stored under the identity of the new file, and every later load gave it."""
    path = onnx_file.with_name(changed)

    def replace(*_: object) -> None:
        fresh = path.with_name("fresh")
        fresh.write_bytes(path.read_bytes())
        os.replace(fresh, path)

    if moment == "read":
        real = onnx_frontend.from_file
        monkeypatch.setattr(onnx_frontend, "from_file", lambda *a, **b: (replace(), real(*a, **b))[1])
    elif moment == "compiled":
        compile = session._compile
        monkeypatch.setattr(session, "_compile", lambda *given: (compile(*given), replace())[0])
    else:
        monkeypatch.setattr(programs, "let_run_first", replace)
    with pytest.warns(CacheWarning, match=f"{changed} has changed while it was compiled"):
        rlx.load(onnx_file)
        wait_until_stored()
    assert ProgramStore().info().entries == 0


def test_a_program_that_is_replaced_while_it_is_loaded_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "a.rlx", tmp_path / "b.rlx"
    rlx.compile(network()).save(path)
    changed = network()
    changed.set_param("w", -changed.param_values["w"])
    rlx.compile(changed).save(other)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    find = ProgramStore.find
    monkeypatch.setattr(ProgramStore, "find", lambda *given: (find(*given), other.replace(path))[0])
    with pytest.warns(UserWarning):
        old = rlx.load(path)(X)
        wait_until_stored()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    with pytest.warns(UserWarning):
        assert not np.array_equal(rlx.load(path)(X), old)


@pytest.mark.parametrize("folder", ["programs", "objects", "streamed"])
def test_what_a_killed_process_leaves_is_counted_and_cleaned(onnx_file: Path, folder: str) -> None:
    """A process is killed while it writes; nobody saw its files, and nobody deleted them."""
    cache = ProgramStore().directory.parent
    code = f"""
import os, signal, numpy as np, rlx
from pathlib import Path
real, where = os.replace, {folder!r}
def kill(source, target):
    if Path(source).parent.name == where:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = kill
if where == "streamed":
    g = rlx.Graph("g")
    x = g.input("x", (1, 256), "f32")
    for i in range(4):
        x = x @ g.param(f"w{{i}}", (256, 256), "f32", np.full((256, 256), i, np.float32))
    g.output("y", x)
    rlx.compile(g, weight_budget="600KiB")
else:
    rlx.load({str(onnx_file)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    first, *more = (cache / folder).glob(f".*{UNFINISHED}")  # code is stored by several threads
    for left in (first, *more):
        os.utime(left, (1, 1))
    store = default_cache() if folder == "objects" else ProgramStore()
    entries = store.info().entries
    assert entries >= 1 and store.info().nbytes >= first.stat().st_size
    with open(first, "rb") as writer:  # as if it were still written
        assert SYSTEM.lock(writer)
        store.clear()
        assert first.exists() and not any(left.exists() for left in more)
    assert store.clear() == 1 and not first.exists() and store.info().entries == 0


def test_stores_are_on_the_disk_before_they_have_a_name(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync, replace = os.fsync, os.replace

    def sync(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    def renamed(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced, f"{target} was not synced"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", renamed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rlx.load(onnx_file)
        wait_until_stored()
    assert ProgramStore().info().entries == 1 and default_cache().info().entries > 0


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
    store, known = ProgramStore(limit=size * 9 // 4), (str(onnx_file), identity(onnx_file))
    for number in range(5):
        store.put(program, known, {"number": number})
    assert store.info().entries == 2
    assert store.find(known, {"number": 4}) is not None and store.find(known, {"number": 0}) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (onnx_file.parent / "file").write_text("")
    monkeypatch.setenv("RLX_CACHE", str(onnx_file.parent / "file"))
    with pytest.warns(CacheWarning, match="not stored"):
        assert rlx.load(onnx_file)(X).shape == (3, 8)


def test_graphs_from_files(tmp_path: Path) -> None:
    from rlx.ir.text.files import save as save_graph

    expected = rlx.compile(network())(X)
    save_graph(network(), tmp_path / "network.graph")
    assert np.array_equal(rlx.load(tmp_path / "network.graph")(X), expected)
    assert np.array_equal(rlx.Session(threads=1).load(tmp_path / "network.graph")(X), expected)
