"""A file from outside is data: what it says about storage, addresses and functions is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_models import X, layout_graph, network, set_own_folders

import rlx
from rlx.errors import FormatError, ParseError, RlxError, UnsupportedError
from rlx.ir.dtype import F32
from rlx.ir.op import all_ops
from rlx.ir.text import files as serialize
from rlx.ir.text.write import graph_text
from rlx.kernel.panels import Panels
from rlx.ops.storage.packing import store_as
from rlx.ops.storage.sparse import columns_of
from rlx.runtime.store import container
from rlx.runtime.store.artifact import Artifact, ArtifactWarning

CONTAINER_KEYS = ("parts", "arrays", "array_bytes", "array_sums", "array_sha256")
own_folders = pytest.fixture(autouse=True)(set_own_folders)
RNG = np.random.default_rng(0)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """What may crash runs in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )


def rewritten(
    path: Path, to: Path, change: Callable[[dict[str, Any], dict[str, bytes], list[np.ndarray]], None]
) -> Path:
    """The file with changed content and all checksums right: what a forger would write."""
    file = container.Container(path)
    header = json.loads(json.dumps(file.header))
    parts = {name: file.part(name) for name in file.part_names}
    arrays = [np.array(file.array(i)) for i in range(file.array_count)]
    for key in CONTAINER_KEYS:
        del header[key]
    change(header, parts, arrays)
    container.write(to, header, parts, arrays)
    return to


def quietly(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArtifactWarning)
        return rlx.load(path, **options)


# -- storage layouts are the compiler's


def test_every_layout_op_is_declared_as_storage() -> None:
    for op in all_ops():
        if (
            op.reader_side
            or op.writer_side
            or op.name.startswith(("pack_", "unpack_"))
            or "layout" in op.attrs
        ):
            assert op.storage, op.name


@pytest.mark.parametrize("kind", ["text", "graph", "source"])
def test_a_file_with_a_storage_layout_is_refused(kind: str, tmp_path: Path) -> None:
    """It overflowed a stage of two vectors on the stack."""
    graph, path = layout_graph(64), tmp_path / "layouts.txt"
    if kind == "text":
        blobs: dict[str, np.ndarray] = {}
        path.write_text(graph_text(graph, blobs=blobs))
    elif kind == "graph":
        serialize.save(graph, path)
    else:
        rlx.compile(network()).save(tmp_path / "network.rlx")

        def plant(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
            parts["source"] = graph_text(graph, blobs={}).encode()

        path = rewritten(tmp_path / "network.rlx", tmp_path / "planted.rlx", plant)
    with pytest.raises(RlxError, match="read_as is a storage layout, which only the compiler") as e:
        quietly(path)
    assert isinstance(e.value, (ParseError, FormatError))


def test_a_layout_in_a_body_is_refused(tmp_path: Path) -> None:
    g = rlx.Graph("loop")
    start, rows = g.input("c", (4,), "f32"), g.input("rows", ("n", 4), "f32")

    def step(c: Any, row: Any) -> tuple[Any, Any]:
        packed = store_as(rlx.ops.reshape(row, (1, 4)), layout=Panels(1, 4, 4, 4, 1).layout)
        return c + rlx.ops.reshape(packed, (4,)), c

    g.output("y", rlx.ops.scan(step, start, rows)[0])
    (tmp_path / "loop.txt").write_text(graph_text(g))
    with pytest.raises(ParseError, match="store_as is a storage layout"):
        rlx.load(tmp_path / "loop.txt")


def test_an_onnx_function_cannot_name_a_layout() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    node = helper.make_node("read_as", ["x"], ["y"], domain="own", layout="64 -> 64: 0:64=64@1")
    body = helper.make_function(
        "own",
        "f",
        ["x"],
        ["y"],
        [helper.make_node("read_as", ["x"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    value = [helper.make_tensor_value_info(n, 1, [64]) for n in ("x", "y")]
    for call in (node, helper.make_node("f", ["x"], ["y"], domain="own")):
        graph = helper.make_graph([call], "g", value[:1], value[1:])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        model = helper.make_model(graph, functions=[body], opset_imports=opsets)
        with pytest.raises(RlxError, match="read_as"):
            rlx.from_onnx(model)


# -- a file that this user did not sign is compiled from its graph


def test_plan_and_code_of_a_foreign_file_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlx.compile(network()).save(tmp_path / "network.rlx")
    expected = rlx.load(tmp_path / "network.rlx")(X)

    def plant(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        parts["0.plan"] = parts["0.outline"] = parts["0.code"] = b"whatever a forger likes"
        needed = {int(name) for name in serialize.read_mir(parts["recovery"].decode(), {}).params}
        for id, number in header["variants"][0]["weights"]:
            if id not in needed and number not in header["params"].values():
                arrays[number][...] = 7

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    path = rewritten(tmp_path / "network.rlx", tmp_path / "forged.rlx", plant)
    assert np.array_equal(quietly(path)(X), expected)
    assert np.array_equal(quietly(path)(X), expected)  # and from the store, where it is now


def test_sizes_and_precision_of_a_foreign_file_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = rlx.compile(network(), assume={"n": 5}, precision="bf16")
    program.save(tmp_path / "network.rlx")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    loaded = quietly(tmp_path / "network.rlx")
    assert loaded.lir.options == program.lir.options
    assert loaded.lir.planner.binding == program.lir.planner.binding
    assert np.array_equal(loaded(X), program(X))


# -- signatures


def signed(tmp_path: Path) -> Path:
    rlx.compile(network()).save(tmp_path / "own.rlx")
    assert Artifact(tmp_path / "own.rlx").is_trusted(0)
    return tmp_path / "own.rlx"


def test_a_signature_covers_source_values_and_weights(tmp_path: Path) -> None:
    path = signed(tmp_path)

    def weights(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        arrays[0].reshape(-1).view(np.uint8)[0] ^= 1

    def source(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        parts["source"] = parts["source"].replace(b"network", b"notwork")

    def unfused(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        parts["0.unfused"] = b""

    def states(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        header["states"], header["facts"] = {}, {"files": []}

    for change in (weights, source, unfused, states):
        rewritten(path, tmp_path / "changed.rlx", change)
        assert not Artifact(tmp_path / "changed.rlx").is_trusted(0), change.__name__


def swapped_words(path: Path) -> None:
    """Exchange two words of a page of weights: the page sums stay, the weights do not."""
    file = container.Container(path)
    start = file.place(file.header["variants"][0]["weights"][0][1])[0]
    with open(path, "r+b") as out:
        out.seek(start)
        words = np.frombuffer(out.read(16), np.uint64)
        assert words[0] != words[1]
        out.seek(start)
        out.write(words[::-1].tobytes())


def test_page_sums_are_no_trust(tmp_path: Path) -> None:
    path = signed(tmp_path)
    rlx.load(path)  # which was checked whole
    swapped_words(path)
    container.Container(path).check_arrays()
    with pytest.raises(FormatError, match="its weights do not match their checksum"):
        rlx.load(path)
    with pytest.raises(FormatError, match="its weights do not match their checksum"):
        Artifact(path).verify()
    with pytest.raises(FormatError, match="its weights do not match their checksum"):
        Artifact(path).accept()


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hashed = signed(tmp_path), []
    check = container.Container.check_weights
    monkeypatch.setattr(
        container.Container, "check_weights", lambda self, mapped: (hashed.append(1), check(self, mapped))
    )
    for _ in range(3):
        rlx.load(path)
    assert len(hashed) == 1
    os.utime(path)
    rlx.load(path)
    assert len(hashed) == 2


# -- data that moves addresses


def sparse_file(tmp_path: Path) -> tuple[Path, int]:
    w = np.zeros((256, 64), np.float32)
    w[RNG.integers(0, 256, 40), RNG.integers(0, 64, 40)] = 1.5
    g = rlx.Graph("sparse")
    g.output("y", g.input("x", ("n", 256), "f32") @ g.param("w", w.shape, "f32", w))
    program = rlx.compile(g)
    assert any(n.op.has("check_stored") for n in program.lir.derived.nodes)
    program.save(tmp_path / "sparse.rlx")
    ((id, _, _),) = Artifact(tmp_path / "sparse.rlx")._variants[0]["addresses"]
    return tmp_path / "sparse.rlx", dict(Artifact(tmp_path / "sparse.rlx")._variants[0]["weights"])[id]


@pytest.mark.parametrize(
    ("word", "value"), [(0, -8), (1, 1 << 40), (64, 10**6), (70, -1), (70, 256), (75, 1 << 60)]
)
def test_sparse_weights_are_checked_at_every_load(word: int, value: int, tmp_path: Path) -> None:
    """Whoever signed: this file is signed again with its new weights."""
    path, number = sparse_file(tmp_path)

    def forge(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        arrays[number].view(np.int64)[word] = value

    forged = rewritten(path, tmp_path / "forged.rlx", forge)
    Artifact(forged).accept()
    for _ in range(2):
        with pytest.raises(FormatError, match="its weights hold a sparse matrix"):
            rlx.load(forged)


def test_starts_whose_differences_wrap_are_refused() -> None:
    """The differences of these starts are all positive, in 64 bits."""
    columns = columns_of(7, 4, 6, F32)
    packed = columns.pack(np.eye(7, 4, dtype=np.float32))
    packed[: columns.rows_at].view(np.int64)[:] = [0, 2**62, -(2**63) + 2**61, -(2**62), 4]
    assert "do not start in order" in str(columns.fault(packed))


@pytest.mark.parametrize("finite", [True, False])
def test_sparse_kernels_stay_inside_whatever_they_read(finite: bool, tmp_path: Path) -> None:
    path, _ = sparse_file(tmp_path)
    done = run(f"""
        import numpy as np, rlx
        from rlx.runtime.store.artifact import Artifact
        Artifact._check_addresses = lambda self, about: None
        program = rlx.load({str(path)!r})
        rng = np.random.default_rng(0)
        about = Artifact({str(path)!r})._variants[0]
        raw = program.weight_memory[about["addresses"][0][0]]
        words = raw[: len(raw) // 8 * 8].view(np.int64)
        words.flags.writeable = True
        x = np.ones((9, 256), np.float32)
        x[3, 7] = 1 if {finite} else np.inf
        for _ in range(200):
            words[rng.integers(0, 105)] = rng.integers(-2**62, 2**62)
            program(x)
        print("alive")
    """)
    assert done.stdout.strip() == "alive", (done.returncode, done.stderr[-2000:])


# -- custom ops


def test_a_file_calls_only_functions_that_are_listed(tmp_path: Path) -> None:
    calls: list[str] = []

    def ref(x: np.ndarray) -> np.ndarray:
        calls.append("ref")
        return x * 2

    rlx.register_op("files.double", ref=ref, infer=lambda x: (calls.append("infer"), x)[1])
    try:
        g = rlx.Graph("custom")
        g.output("y", rlx.ops.custom("files.double", g.input("x", (2,), "f32")))
        (tmp_path / "custom.txt").write_text(graph_text(g))
        serialize.save(g, tmp_path / "custom.graph")
        rlx.compile(g).save(tmp_path / "own.rlx")
        strange = rewritten(
            tmp_path / "own.rlx", tmp_path / "strange.rlx", lambda h, p, a: h["facts"].update(a=1)
        )
        calls.clear()
        for path in (tmp_path / "custom.txt", tmp_path / "custom.graph", strange):
            for given in ((), ("files.triple",)):
                with pytest.raises(RlxError, match=r"custom op 'files.double'; if it may, pass custom=\["):
                    quietly(path, custom=given)
            assert not calls
            for _ in range(2):  # compiled, and from the store
                assert quietly(path, custom=["files.double"])(np.ones(2, np.float32)).tolist() == [2, 2]
            with pytest.raises(RlxError, match="custom op"):
                quietly(path)
            calls.clear()
        assert rlx.load(tmp_path / "own.rlx")(np.ones(2, np.float32)).tolist() == [
            2,
            2,
        ]  # signed by this user
    finally:
        rlx.ops.unregister_op("files.double")


# -- how much of a program is native


def test_load_says_how_much_is_native(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    g = rlx.Graph("partly")
    x = g.input("x", (8,), "f32")
    g.output("y", rlx.ops.exp(x) * 2.0)
    (tmp_path / "native.txt").write_text(graph_text(g))
    with caplog.at_level("INFO", logger="rlx"):
        rlx.load(tmp_path / "native.txt", strict=True)
        assert caplog.messages[-1] == f"{tmp_path / 'native.txt'}: all of its 1 kernels are native"


def test_strict_refuses_what_the_host_computes(tmp_path: Path) -> None:
    rlx.register_op("files.host", ref=lambda x: x + 1, infer=lambda x: x)
    try:
        g = rlx.Graph("partly")
        x = g.input("x", (8,), "f32")
        g.output("y", rlx.ops.exp(x) * 2.0)
        g.output("z", rlx.ops.custom("files.host", x))
        path = tmp_path / "partly.graph"
        serialize.save(g, path)
        for _ in range(2):  # compiled, and from the store
            assert rlx.load(path, custom=["files.host"]).native_share == (
                "1 of its 2 kernels are native; the host computes custom"
            )
            with pytest.raises(UnsupportedError, match=r"computes custom .*; load it without strict"):
                rlx.load(path, custom=["files.host"], strict=True)
    finally:
        rlx.ops.unregister_op("files.host")


# -- files that change under a program


def test_cutting_a_loaded_file_is_noticed(tmp_path: Path) -> None:
    """A mapped file that is cut raised SIGBUS and ended the process."""
    done = run(f"""
        import os, signal, numpy as np, rlx
        from rlx.errors import FormatError
        from rlx.runtime.store import container
        path = {str(tmp_path / "large.rlx")!r}
        g = rlx.Graph("large")
        value = np.ones((1 << 10, 1 << 9), np.float32)
        g.output("y", g.input("x", (4, 1 << 10), "f32") @ g.param("p", value.shape, "f32", value))
        program = rlx.compile(g)
        program.save(path)
        x = np.ones((4, 1 << 10), np.float32)
        container.MOST_READ = 64 << 20
        small = rlx.load(path)  # is read
        container.MOST_READ = 1 << 16
        large = rlx.load(path)  # is mapped
        assert large._weights.watched and not small._weights.watched
        assert np.array_equal(large(x), program(x))
        os.truncate(path, os.path.getsize(path) // 4)
        assert np.array_equal(small(x), program(x))
        for attempt in range(2):
            try:
                large(x)
            except FormatError as e:
                print("cut while it was in use; restore it" in str(e))
        assert signal.getsignal(signal.SIGBUS) == signal.SIG_DFL
    """)
    assert done.stdout.split() == ["True", "True"], (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize(
    ("entry", "value", "why"),
    [
        ("offset", "-4", "offset '-4', which is not a number of bytes"),
        ("offset", "1" * 30, "not a number of bytes"),
        ("length", "x", "length 'x', which is not"),
        ("offset", str(1 << 40), "the files do not belong together"),
        ("location", "../m.bin", "points outside the folder"),
        ("location", ".", "which is not there"),
        ("location", "pipe", "which is not there"),
    ],
)
def test_external_data_is_data(entry: str, value: str, why: str, tmp_path: Path, require: Any) -> None:
    require("onnx")
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((512, 512), np.float32), "w")
    info = [helper.make_tensor_value_info(n, 1, ["n", 512]) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    os.mkfifo(tmp_path / "pipe")
    loaded = rlx.from_onnx(path)
    (tmp_path / "m.bin").write_bytes(b"cut")  # it is read, not mapped
    assert rlx.compile(loaded)(np.ones((1, 512), np.float32))[0, 0] == 512
    proto = onnx.load_model(path, load_external_data=False)
    for e in proto.graph.initializer[0].external_data:
        if e.key == entry:
            e.value = value
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(RlxError, match=why):
        rlx.from_onnx(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the guard is for Linux")
def test_other_faults_reach_the_handler_that_was_there(tmp_path: Path) -> None:
    code = f"""
        import faulthandler, mmap, os, sys
        from rlx.runtime.native.bus_guard import Guarded
        if {{before}}: faulthandler.enable()
        path = {str(tmp_path / "mapped")!r}
        with open(path, "wb") as out: out.write(bytes(1 << 16))
        with open(path, "rb") as file:
            ours = Guarded(file.fileno(), 1 << 16)
            theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(path, 0)
        print(int(ours.array[5000]), ours.broken, flush=True)
        theirs[5000]
    """
    for before in (True, False):
        done = run(code.format(before=before))
        assert done.returncode == -7 and done.stdout.split() == ["0", "True"]
        assert ("Fatal Python error: Bus error" in done.stderr) == before
