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
from stored_models import X, network, set_own_folders

import rlx
from rlx.errors import FormatError, ParseError, RlxError, UnsupportedError
from rlx.ir.dtype import F32
from rlx.ir.op import all_ops, get_op
from rlx.ir.text import files as serialize
from rlx.ir.text.write import graph_text
from rlx.kernel.layout import Layout
from rlx.kernel.panels import ChannelBlocks, KernelPanels, Panels, QuantLayout
from rlx.ops.quant.group_layout import pack_quantised
from rlx.ops.storage.packing import from_blocks, read_as, store_as, to_blocks
from rlx.ops.storage.sparse import columns_of
from rlx.ops.storage.winograd import WinogradLayout, transform_kernel
from rlx.runtime.store import container
from rlx.runtime.store.artifact import Artifact, ArtifactWarning
from rlx.target.cpu import resolve

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


def layout_graph(columns: int) -> rlx.Graph:
    """A convolution whose packed weights say that a panel has this many columns."""
    lanes = resolve("host").lanes("f32")
    layout = KernelPanels((64, 4, 3, 3), 1, columns, lanes, 1).layout
    g = rlx.Graph("layouts")
    x = g.input("x", (1, 4, 12, 12), "f32")
    w = RNG.standard_normal((64, 4, 3, 3)).astype(np.float32)
    p = g.param("w", (layout.elements,), "f32", layout.pack(w))
    g.output("y", rlx.ops.conv(x, read_as(p, layout=layout), padding=1))
    return g


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


@pytest.mark.parametrize("columns", [8, 64, 128])
def test_emitters_refuse_other_panels_of_a_kernel(columns: int) -> None:
    """The host computes what no kernel of the target reads; the result is right."""
    graph = layout_graph(columns)
    program = rlx.compile(graph, cache=False)
    x = RNG.standard_normal((1, 4, 12, 12)).astype(np.float32)
    want = rlx.ops.conv(x, graph_value(graph), padding=1)
    np.testing.assert_allclose(program(x), want, rtol=1e-4, atol=1e-4)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    native = columns == 2 * resolve("host").lanes("f32")
    assert native or any("no layout that kernels for" in why for why in told), told


def graph_value(graph: rlx.Graph) -> np.ndarray:
    (unpack,) = (n for n in graph.nodes if n.op is read_as)
    value: np.ndarray = unpack.op.ref(graph.param_values["w"], **unpack.attrs)
    return value


@pytest.mark.parametrize("change", [{"lanes": 1}, {"columns": 4}, {"columns": 1024}, {"group": 2}])
def test_emitters_refuse_other_panels_of_a_matrix(change: dict[str, int]) -> None:
    """Panels with fewer lanes are smaller than the vectors that a kernel reads."""
    lanes = resolve("host").lanes("f32")
    layout = Panels(**{"k": 32, "n": 137, "columns": 2 * lanes, "lanes": lanes, "group": 1} | change)
    w = RNG.standard_normal((32, 137)).astype(np.float32)
    g = rlx.Graph("panels")
    x = g.input("x", (8, 32), "f32")
    p = g.param("w", (layout.elements,), "f32", layout.layout.pack(w))
    g.output("y", x @ read_as(p, layout=layout.layout))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 32)).astype(np.float32)
    np.testing.assert_allclose(program(given), given @ w, rtol=1e-4, atol=1e-4)
    assert "no layout that kernels for" in program.stats["host_thunks"][0]["why"]


LANES = resolve("host").lanes("f32")


def convolved(x: Any, y: Any, w: np.ndarray, kernel: Layout, groups: int) -> list[str]:
    """Run a convolution whose image is read as `x`, result stored as `y` and weights read as `kernel`; why
    parts of it run on the host."""
    g = rlx.Graph("stated")
    image = RNG.standard_normal((1, 2 * LANES, 6, 6)).astype(np.float32)
    given = g.input("x", image.shape if x is None else x.pack(image).shape, "f32")
    p = g.param("w", (kernel.elements,), "f32", kernel.pack(w))
    read = given if x is None else read_as(given, layout=x)
    made = rlx.ops.conv(read, read_as(p, layout=kernel), padding=1, groups=groups)
    g.output("y", made if y is None else store_as(made, layout=y))
    want = rlx.ops.conv(image, w, padding=1, groups=groups)
    program = rlx.compile(g, cache=False)
    got = program(image if x is None else x.pack(image))
    np.testing.assert_allclose(got if y is None else y.unpack(got), want, rtol=1e-4, atol=1e-4)
    return [thunk["why"] for thunk in program.stats["host_thunks"]]


def own_and_foreign_images() -> dict[str, tuple[Any, Any, Any, int, bool]]:
    """Layouts of image, result and weights, the number of groups, and whether kernels read and write them."""
    channels, blocks = 2 * LANES, ChannelBlocks(4, 2 * LANES, LANES).layout
    half = ChannelBlocks(4, channels, LANES // 2).layout
    last = Layout.parse(f"?,{channels},?,? -> ?,?,?,{channels}: 0:{channels}={channels}@1")
    shape, depthwise = (channels, channels, 3, 3), (channels, 1, 3, 3)
    direct = KernelPanels(shape, 1, 2 * LANES, LANES, LANES).layout
    planar = KernelPanels(shape, 1, 2 * LANES, LANES, 1).layout
    by_channel = KernelPanels(depthwise, 1, LANES, LANES, 1).layout
    turned = KernelPanels(depthwise, 1, 2 * LANES, LANES, 1).layout
    return {
        "direct": (blocks, blocks, direct, 1, True),
        "planar": (None, None, planar, 1, True),
        "depthwise": (blocks, blocks, by_channel, channels, True),
        "image, channels last": (last, blocks, direct, 1, False),
        "result, channels last": (blocks, last, direct, 1, True),  # a kernel of its own moves it
        "result, half of the lanes": (blocks, half, direct, 1, False),
        "weights for planes": (blocks, blocks, planar, 1, False),
        "weights for blocks": (None, None, direct, 1, False),
        "weights of depthwise": (blocks, blocks, turned, channels, False),
    }


@pytest.mark.parametrize("case", own_and_foreign_images())
def test_emitters_of_convolutions_refuse_what_they_do_not_read(case: str) -> None:
    """Every stated layout is compared with the kernel's own; the host computes what none reads."""
    x, y, kernel, groups, native = own_and_foreign_images()[case]
    w = RNG.standard_normal(kernel.sizes).astype(np.float32)
    told = convolved(x, y, w, kernel, groups)
    assert bool(told) is not native, told
    assert native or any("no layout that kernels for" in why for why in told), told


@pytest.mark.parametrize("lanes", [LANES, LANES // 2, 1])
def test_emitters_of_quantised_weights_refuse_other_lanes(lanes: int) -> None:
    layout = QuantLayout(32, 24, 4, 16, lanes)
    codes = RNG.integers(-8, 8, (32, 24))
    g = rlx.Graph("bits")
    x = g.input("x", (8, 32), "f32")
    packed = pack_quantised(codes, np.full((2, 24), 0.5), layout)
    p = g.param("w", packed.shape, "u8", packed)
    g.output("y", x @ get_op("unpack_groups")(p, **vars(layout)))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 32)).astype(np.float32)
    np.testing.assert_allclose(program(given), given @ (codes * np.float32(0.5)), rtol=1e-4, atol=1e-4)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    assert bool(told) is (lanes != LANES) and all("no layout that kernels for" in why for why in told), told


@pytest.mark.parametrize("columns", [2 * LANES, LANES])
def test_emitters_of_winograd_refuse_other_panels(columns: int) -> None:
    layout = WinogradLayout(4, LANES, 2 * LANES, columns, LANES)
    w = RNG.standard_normal((LANES, 2 * LANES, 3, 3)).astype(np.float32)
    g, unpack = rlx.Graph("winograd"), get_op("unpack_winograd")
    x = from_blocks(g.input("x", (1, 2, 8, 8, LANES), "f32"), 2 * LANES)
    kernel = unpack(transform_kernel(g.constant(w), layout), **{k: getattr(layout, k) for k in unpack.attrs})
    g.output("y", to_blocks(rlx.ops.conv(x, kernel, padding=1), LANES))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((1, 2, 8, 8, LANES)).astype(np.float32)
    want = to_blocks(rlx.ops.conv(from_blocks(given, 2 * LANES), w, padding=1), LANES)
    np.testing.assert_allclose(program(given), want, rtol=1e-3, atol=1e-3)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    assert bool(told) is (columns != 2 * LANES) and all(
        "no layout that kernels for" in why for why in told
    ), told


def test_blocks_without_packed_weights_are_refused() -> None:
    g = rlx.Graph("blocks")
    x = g.input("x", (1, 2, 6, 6, LANES), "f32")
    w = RNG.standard_normal((LANES, 2 * LANES, 3, 3)).astype(np.float32)
    g.output("y", to_blocks(rlx.ops.conv(from_blocks(x, 2 * LANES), g.constant(w), padding=1), LANES))
    given = RNG.standard_normal((1, 2, 6, 6, LANES)).astype(np.float32)
    want = to_blocks(rlx.ops.conv(from_blocks(given, 2 * LANES), w, padding=1), LANES)
    np.testing.assert_allclose(rlx.compile(g, cache=False)(given), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64", "x86-64-v4", "x86-64-v4-bf16-vnni", "aarch64"])
def test_what_the_compiler_lays_out_every_target_reads(target: str) -> None:
    """A refusal here would be a program that is slower and says so nowhere."""
    from rlx.api.compile import plan
    from rlx.codegen.cpu.build import build_kernels
    from rlx.kernel.views import view_layouts

    g = rlx.Graph("all")
    x = g.input("x", ("n", 16, 20, 20), "f32")

    def weights(*shape: int) -> np.ndarray:
        return RNG.standard_normal(shape).astype(np.float32)

    y = rlx.ops.conv(x, g.constant(weights(64, 16, 3, 3)), padding=1)
    y = rlx.ops.conv(rlx.ops.relu(y), g.constant(weights(64, 1, 3, 3)), padding=1, groups=64)
    y = rlx.ops.conv(y, g.constant(weights(32, 64, 1, 1)))
    flat = rlx.ops.mean(y, axis=(2, 3)) @ g.constant(weights(32, 100))
    sparse = weights(100, 64) * (RNG.random((100, 64)) < 0.05)
    g.output("y", flat @ g.constant(sparse.astype(np.float32)))
    for precision in ("f32", "bf16"):
        lir = plan(g, target=target, precision=precision)
        made = build_kernels(lir, resolve(target), view_layouts(lir.mir))
        assert not [thunk.why for thunk in made.thunks.values() if "no layout" in thunk.why]


# -- a file that this user did not sign is compiled from its graph


def test_plan_and_derived_weights_of_a_foreign_file_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlx.compile(network()).save(tmp_path / "network.rlx")
    expected = rlx.load(tmp_path / "network.rlx")(X)
    params = set(container.Container(tmp_path / "network.rlx").header["params"].values())

    def plant(header: dict[str, Any], parts: dict[str, bytes], arrays: list[np.ndarray]) -> None:
        parts["0.plan"] = parts["0.outline"] = parts["0.code"] = b"whatever a forger likes"
        for _, number in header["variants"][0]["weights"]:
            if number not in params:
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
    start = file.place(file.header["params"]["w"])[0]
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
