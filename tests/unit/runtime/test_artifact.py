"""Programs in files: what is saved comes back, damage is refused, foreign code is not run."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_models import X, network, set_own_folders

import rlx
from machines import another
from rlx.codegen.cpu import kernels
from rlx.codegen.native import jit
from rlx.errors import ConfigError, FormatError, InputError, RlxError
from rlx.ir.text import container as layout
from rlx.ir.text.container import PROGRAM, VERSION
from rlx.ir.weights import weight_start
from rlx.runtime import native_code
from rlx.runtime.store import container, save
from rlx.runtime.store.artifact import Artifact, ArtifactWarning

CONTAINER_KEYS = ("parts", "arrays", "array_bytes", "array_sums", "array_sha256")
own_folders = pytest.fixture(autouse=True)(set_own_folders)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved program, signed by nobody that the tests below know."""
    folder = tmp_path_factory.mktemp("saved")
    before = dict(os.environ)
    os.environ |= {"RLX_CACHE": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
    try:
        rlx.compile(network()).save(folder / "network.rlx")
    finally:
        os.environ.clear()
        os.environ |= before
    return folder / "network.rlx"


def quietly(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArtifactWarning)
        return rlx.load(path, **options)


# -- what is saved comes back


def test_save_and_load(tmp_path: Path) -> None:
    program = rlx.compile(network())
    expected = program(X)
    program.save(tmp_path / "network.rlx")
    compiles = jit.llvm_compiles
    loaded = rlx.load(tmp_path / "network.rlx")
    assert np.array_equal(loaded(X), expected)
    assert np.array_equal(loaded(X[:1]), program(X[:1]))
    assert jit.llvm_compiles == compiles and loaded.notes == []
    assert loaded.lir.code_key == program.lir.code_key
    assert list(loaded.decisions) == list(program.decisions)
    assert loaded.stats == program.stats
    assert str(loaded.lir.unfused) == str(program.lir.unfused)
    assert loaded.memory({"n": 7}) == program.memory({"n": 7})
    assert loaded.lir.fingerprint() == program.lir.fingerprint()
    assert loaded.lir.specialize({"n": 9}).plan.sizes() == program.lir.specialize({"n": 9}).plan.sizes()
    assert {s.node.id for s in loaded.trace({"x": X})[0].spans} == set(loaded.lir.plan.schedule)


def loops() -> rlx.Graph:
    """A loop that runs natively."""
    g = rlx.Graph("loops")
    start, rows = g.input("start", (4,), "f32"), g.input("rows", ("n", 4), "f32")
    last, all_ = rlx.ops.scan(lambda c, r: (rlx.ops.tanh(c + r), c), start, rows)
    g.output("last", last)
    g.output("all", all_)
    return g


def thunks() -> rlx.Graph:
    """Sizes that data decide, some of it on the host."""
    g = rlx.Graph("thunks")
    x = g.input("x", ("n",), "f32")
    g.output("found", rlx.ops.unique(x) * 2.0)
    g.output("places", rlx.ops.nonzero(x)[0])
    return g


@pytest.mark.parametrize(
    ("graph", "inputs"),
    [
        (loops, (np.ones(4, np.float32), np.arange(12, dtype=np.float32).reshape(3, 4))),
        (loops, (np.ones(4, np.float32), np.zeros((0, 4), np.float32))),
        (thunks, (np.array([3, 0, 1, 3, 0], np.float32),)),
    ],
)
def test_loops_and_host_thunks(graph: Callable[[], rlx.Graph], inputs: Any, tmp_path: Path) -> None:
    program = rlx.compile(graph())
    program.save(tmp_path / "p.rlx")
    loaded = rlx.load(tmp_path / "p.rlx")
    assert loaded.stats == program.stats
    for want, got in zip(program(*inputs), loaded(*inputs), strict=True):
        assert np.array_equal(want, got) and want.dtype == got.dtype
    named = dict(zip(loaded.input_names, inputs, strict=True))
    assert len(loaded.trace(named)[0].spans) == len(program.trace(named)[0].spans)


def test_params_of_a_loaded_program_can_be_set(tmp_path: Path) -> None:
    program = rlx.compile(network())
    program.save(tmp_path / "network.rlx")
    loaded = rlx.load(tmp_path / "network.rlx")
    for name, shape in (("w", (40, 24)), ("v", (24, 8))):
        value = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        program.set_param(name, value)
        loaded.set_param(name, value)
        assert np.array_equal(loaded(X), program(X))
    with pytest.raises(InputError, match="no param 'u'"):
        loaded.set_param("u", X)
    loaded.save(tmp_path / "again.rlx")  # with the values it has now, and from its own origin
    assert np.array_equal(rlx.load(tmp_path / "again.rlx")(X), program(X))
    assert not np.array_equal(rlx.load(tmp_path / "network.rlx")(X), program(X))


def test_a_param_without_value(tmp_path: Path) -> None:
    g = rlx.Graph("open")
    g.output("y", g.input("x", (2, 3), "f32") @ g.param("w", (3, 3), "f32"))
    rlx.compile(g).save(tmp_path / "open.rlx")
    loaded = rlx.load(tmp_path / "open.rlx")
    with pytest.raises(InputError, match="w"):
        loaded(np.ones((2, 3), np.float32))
    loaded.set_param("w", np.eye(3, dtype=np.float32))
    assert loaded(np.ones((2, 3), np.float32)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", ["bf16", "f16", "i8", "bool", "c64", "i4", "f8e4m3fn"])
def test_values_of_any_dtype(dtype: str, tmp_path: Path) -> None:
    from rlx.ir.dtype import convert
    from rlx.ir.dtype import dtype as as_dtype

    value = convert(np.arange(300) % 2, as_dtype(dtype))
    g = rlx.Graph("kinds")
    g.output("y", rlx.ops.flip(g.param("p", (300,), dtype, value), axis=0))
    rlx.compile(g).save(tmp_path / "kinds.rlx")
    out = rlx.load(tmp_path / "kinds.rlx")()
    assert out.dtype == value.dtype and np.array_equal(out, value[::-1])


def test_several_targets_in_one_file(tmp_path: Path) -> None:
    program = rlx.compile(network())
    program.save(tmp_path / "network.rlx", targets=("x86-64", "aarch64", "host"))
    file = Artifact(tmp_path / "network.rlx")
    assert file.targets == list(dict.fromkeys([program.lir.target, "x86-64", "aarch64"]))
    compiles = jit.llvm_compiles
    baseline = rlx.load(tmp_path / "network.rlx", target="x86-64")
    assert baseline.lir.target == "x86-64" and jit.llvm_compiles == compiles
    np.testing.assert_allclose(baseline(X), program(X), rtol=1e-4, atol=1e-4)


def test_a_file_without_code_for_this_target_is_compiled(tmp_path: Path) -> None:
    name = another()
    rlx.compile(network()).save(tmp_path / "network.rlx")
    other = rlx.load(tmp_path / "network.rlx", target=name)
    assert other.lir.target == name and "not for this machine" in other.notes[0]
    np.testing.assert_allclose(other(X), rlx.compile(network())(X), rtol=1e-4, atol=1e-4)


def test_code_of_another_generator_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = rlx.compile(network())
    with monkeypatch.context() as m:
        m.setattr(save, "generator", lambda: "an older one")
        program.save(tmp_path / "network.rlx")
    loaded = rlx.load(tmp_path / "network.rlx")
    assert "it was compiled" in loaded.notes[0] and np.array_equal(loaded(X), program(X))


def test_kernels_with_another_calling_convention_are_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another version is compiled anew; a description that slipped through is refused."""
    program = rlx.compile(network())
    with monkeypatch.context() as m:
        m.setattr(native_code, "ABI", kernels.ABI - 1)
        program.save(tmp_path / "network.rlx")
    loaded = rlx.load(tmp_path / "network.rlx")
    assert "it was compiled" in loaded.notes[0] and np.array_equal(loaded(X), program(X))
    description = json.loads(program.kernels.describe())
    for changed in ({"abi": kernels.ABI - 1}, {"abi": None}):
        with pytest.raises(FormatError, match=r"version .* but this RLX calls them by version"):
            kernels.KernelSet.recall(json.dumps(description | changed))


class _Writes(io.BytesIO):
    """A file that notes where arrays of some size are written."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        if len(data) > 1 << 16:
            self.noted.append((self.tell(), len(data)))
        return super().write(data)


def test_arrays_are_written_in_whole_huge_pages() -> None:
    """Linux keeps what is written at once on a huge page of the file's cache, which is mapped as one."""
    random, huge = np.random.default_rng(0), 2 << 20
    sizes = [(3 << 20) + 5, 7, 4096, 2 << 20, 3, 5 << 20, 0, 100_000]
    arrays = [random.integers(0, 256, size, np.uint8) for size in sizes]
    file = _Writes()
    layout.write_to(file, PROGRAM, {"name": "a"}, {"text": b"hello"}, arrays)
    starts, lengths = zip(*file.noted, strict=True)
    assert all(start % huge == 0 for start in starts)
    assert set(lengths[:-1]) == {huge}
    first, content = starts[0], file.getvalue()
    end = 0
    for array in arrays:
        start = weight_start(end, array.nbytes)
        assert not any(content[first + end : first + start])
        end = start + array.nbytes
        assert content[first + start : first + end] == array.tobytes()


def test_weights_are_mapped_and_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("large")
    value = np.random.default_rng(0).standard_normal((1 << 10, 1 << 10)).astype(np.float32)
    g.output(
        "y", g.input("x", (1 << 10,), "f32") + rlx.ops.sum(g.param("p", value.shape, "f32", value), axis=0)
    )
    rlx.compile(g).save(tmp_path / "large.rlx")
    monkeypatch.setattr(container, "MOST_READ", 64 << 20)
    raw = container.Container(tmp_path / "large.rlx").raw(0)
    assert not raw.flags.writeable and raw.ctypes.data % (2 << 20) == 0
    own = tmp_path / "cache" / "own.rlx"
    own.write_bytes((tmp_path / "large.rlx").read_bytes())
    maps = Path("/proc/self/maps")
    for path, most_read, mapped in (
        (tmp_path / "large.rlx", 64 << 20, False),
        (tmp_path / "large.rlx", 1 << 20, True),
        (own, 64 << 20, True),
    ):
        monkeypatch.setattr(container, "MOST_READ", most_read)
        loaded = rlx.load(path)
        if maps.exists():
            assert (path.name in maps.read_text()) == mapped
        assert np.array_equal(
            loaded(np.zeros(1 << 10, np.float32)), rlx.compile(g)(np.zeros(1 << 10, np.float32))
        )


def test_saving_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "network.rlx"
    program = rlx.compile(network())
    program.save(path)
    first = rlx.load(path)
    expected = first(X)
    program.set_param("w", np.zeros((40, 24), np.float32))
    program.save(path)  # the first program still reads the old file
    assert np.array_equal(first(X), expected)
    assert np.array_equal(rlx.load(path)(X), program(X))
    assert sorted(n for n in os.listdir(tmp_path) if "network" in n) == ["network.rlx"]
    with pytest.raises(FormatError, match="cannot write"):
        program.save(tmp_path / "no" / "such" / "folder.rlx")


def test_options_that_are_fixed(saved: Path) -> None:
    with pytest.raises(ConfigError, match="precision cannot be changed"):
        rlx.load(saved, precision="bf16")
    with pytest.raises(ConfigError, match="shapes are for ONNX"):
        rlx.load(saved, shapes={"x": (1, 2)})


def test_a_loaded_program_that_is_dropped_is_gone(tmp_path: Path) -> None:
    """At once, with its memory, not when somebody looks for garbage."""
    rlx.compile(network()).save(tmp_path / "network.rlx")
    gc.disable()
    try:
        loaded = rlx.load(tmp_path / "network.rlx")
        loaded(X)
        alive = weakref.ref(loaded)
        del loaded
        assert alive() is None
    finally:
        gc.enable()


# -- trust


def test_a_foreign_file_is_compiled_again_from_its_graph(saved: Path) -> None:
    with pytest.warns(ArtifactWarning, match="not signed by this user: its code was not run"):
        loaded = rlx.load(saved)
    assert "rlx trust FILE" in loaded.notes[0]
    assert np.array_equal(loaded(X), rlx.compile(network())(X))


def test_foreign_code_is_never_opened(saved: Path, tmp_path: Path) -> None:
    def plant(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        parts["0.code"] = b"whatever a forger likes"

    path = rewritten(saved, tmp_path / "forged.rlx", plant)
    assert np.array_equal(quietly(path)(X), rlx.compile(network())(X))
    with pytest.raises(FormatError, match="its code is damaged"):
        rlx.load(path, trust_native=True)


def test_trust_once_and_for_good(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiles = jit.llvm_compiles
        assert np.array_equal(rlx.load(saved, trust_native=True)(X), rlx.load(saved, trust_native=True)(X))
        Artifact(saved).accept()
        assert rlx.load(saved).notes == []
        assert jit.llvm_compiles <= compiles + 2  # pool and driver, in the new cache


def test_a_signature_covers_plan_and_code_together(tmp_path: Path) -> None:
    """Signed code beside another plan is foreign: it would read and write elsewhere."""
    rlx.compile(network()).save(tmp_path / "a.rlx")
    assert Artifact(tmp_path / "a.rlx").is_trusted(0)

    def smaller_slot(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        parts["0.plan"] = parts["0.plan"].replace(b"n,8]", b"n,4]")

    def other_weight(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        header["variants"][0]["weights"][0][1] ^= 1

    def other_outline(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        parts["0.outline"] = parts["0.outline"].replace(b"n,8]", b"n,4]")

    for change in (smaller_slot, other_weight, other_outline):
        rewritten(tmp_path / "a.rlx", tmp_path / "b.rlx", change)
        assert not Artifact(tmp_path / "b.rlx").is_trusted(0)


def test_parsing_runs_nothing(saved: Path) -> None:
    """Opening a file imports neither llvmlite nor what would make code."""
    code = (
        "import sys; from rlx.runtime.store.artifact import Artifact\n"
        f"file = Artifact({str(saved)!r}); file.source(); file.is_trusted(0); file.container.check_all()\n"
        "print('llvmlite' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


# -- damage


def rewritten(
    path: Path,
    to: Path,
    change: Callable[[dict[str, Any], dict[str, bytes]], None] = lambda header, parts: None,
) -> Path:
    """The file with a changed header or changed parts, and all checksums right: what a forger would write."""
    file = container.Container(path)
    header = json.loads(json.dumps(file.header))
    parts = {name: file.part(name) for name in file.part_names}
    arrays = [file.array(i) for i in range(file.array_count)]
    for key in CONTAINER_KEYS:
        del header[key]
    change(header, parts)
    container.write(to, header, parts, arrays)
    return to


def refused(path: Path) -> None:
    """Loading gives a FormatError, whatever is asked of the file."""
    with pytest.raises(FormatError, match=path.name):
        quietly(path)


def test_truncation(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    sizes = {0, 1, 7, 8, 63, 64, 65, 100, len(data) // 2, len(data) - 1, *range(64, len(data), 997)}
    for size in sorted(sizes):
        (tmp_path / "cut.rlx").write_bytes(data[:size])
        refused(tmp_path / "cut.rlx")
    (tmp_path / "long.rlx").write_bytes(data + b"\0")
    refused(tmp_path / "long.rlx")


def test_flipped_bytes(saved: Path, tmp_path: Path) -> None:
    """Every byte is covered, or is padding that nothing reads."""
    data = saved.read_bytes()
    expected = quietly(saved)(X)
    rng, target = np.random.default_rng(0), tmp_path / "flipped.rlx"
    used = len(data) - 4096 * 4
    places = {*range(64), *rng.integers(0, len(data), 150).tolist(), *range(used, len(data), 1001)}
    found = 0
    for place in sorted(places):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        target.write_bytes(damaged)
        try:
            loaded = quietly(target)
            loaded.set_param("v", loaded.param_values["v"])  # reads the derived weights' graph too
            _ = loaded.decisions, loaded.lir.unfused
        except FormatError:
            found += 1
        else:
            assert np.array_equal(loaded(X), expected), f"byte {place}"
    assert found > len(places) // 3  # the others are padding, and code, which is compiled again


def test_garbage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for size in (8, 64, 1000, 100_000):
        for start in (b"", PROGRAM.mark):
            path = tmp_path / "garbage.rlx"
            path.write_bytes(start + rng.bytes(size))
            refused(path)
    for header in (b"", b"{}", b"[]", b"nonsense", b"[" * 100_000, b'{"parts": 1' + b"0" * 5000 + b"}"):
        bare = struct.pack("<8sIIQQ32s", PROGRAM.mark, VERSION, 0, len(header), 64 + len(header), b"")
        (tmp_path / "garbage.rlx").write_bytes(bare[:32] + hashlib.sha256(bare + header).digest() + header)
        refused(tmp_path / "garbage.rlx")


def test_another_version_is_told(saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    struct.pack_into("<I", data, 8, 7)
    (tmp_path / "new.rlx").write_bytes(data)
    with pytest.raises(FormatError, match="format version 7, but this RLX reads version 2"):
        rlx.load(tmp_path / "new.rlx")


VALUES = (None, -1, 0, 1, 10**30, 1.5, "", "x", "f32", [], [1], {}, {"n": -1}, [[0, 0]], [[10**9, 0]], True)


def forgeries(header: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a header."""
    items = (
        header.items() if isinstance(header, dict) else enumerate(header) if isinstance(header, list) else ()
    )
    out = [trail] if trail else []
    for key, value in items:
        out += forgeries(value, (*trail, key))
    return out


def test_forged_headers(saved: Path, tmp_path: Path) -> None:
    """A file with right checksums and any nonsense in its header: refused, or it computes what it says."""
    rng = np.random.default_rng(0)
    tried = 0
    for place in 3 * forgeries(container.Container(saved).header):
        if place[0] in CONTAINER_KEYS:
            continue
        value = VALUES[int(rng.integers(len(VALUES)))]

        def change(header: Any, parts: dict[str, bytes], place: Any = place, value: Any = value) -> None:
            for key in place[:-1]:
                header = header[key]
            header[place[-1]] = value

        path = rewritten(saved, tmp_path / "forged.rlx", change)
        try:
            quietly(path)
        except RlxError as e:
            assert isinstance(e, (FormatError, ConfigError)), f"{place}: {value!r}: {e!r}"
        tried += 1
    assert tried > 90


@pytest.mark.parametrize("part", ["0.plan", "0.unfused", "0.outline", "source"])
def test_forged_plans(part: str, saved: Path, tmp_path: Path) -> None:
    """Texts with right checksums that are no sound graphs, or do not fit the weights."""
    changes: list[Callable[[bytes], bytes]] = [
        lambda text: b"",
        lambda text: b"\xff\xfe",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b"f32", b"f64", 1),
        lambda text: text.replace(b"40", b"41"),
        lambda text: text.replace(b"40", b"99999999999999"),
        lambda text: text.replace(b"param", b"input"),
        lambda text: text.replace(b"%1", b"%0"),
        lambda text: text + b"graph",
        lambda text: b"graph " * 10_000,
    ]
    for change in changes:

        def forge(header: dict[str, Any], parts: dict[str, bytes], change: Any = change) -> None:
            parts[part] = change(parts[part])

        path = rewritten(saved, tmp_path / "forged.rlx", forge)
        try:
            quietly(path, target="x86-64" if part == "source" else "host")
        except RlxError as e:
            assert isinstance(e, FormatError), repr(e)
