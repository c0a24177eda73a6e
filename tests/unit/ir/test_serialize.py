"""Graphs in files: everything comes back, and damage of any kind is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_graphs import GRAPHS, assert_same, hello, stateful

from rlx.errors import FormatError
from rlx.fuzz.containers import put_together, taken_apart, with_header
from rlx.ir.dtype import ALL_DTYPES, DType, unpack
from rlx.ir.graph import Graph
from rlx.ir.text import container
from rlx.ir.text.container import GRAPH, PLAN, PROGRAM, Kind
from rlx.ir.text.files import load, save
from rlx.model_kinds import what_else


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_come_back(name: str, tmp_path: Path) -> None:
    g = GRAPHS[name]()
    save(g, tmp_path / "g")
    again = load(tmp_path / "g")
    assert_same(g, again)
    for before, after in ((g.param_values, again.param_values), (g.state_values, again.state_values)):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert value.dtype == after[key].dtype and value.tobytes() == after[key].tobytes()


@pytest.mark.parametrize("of", ALL_DTYPES, ids=str)
def test_params_of_every_dtype(of: DType, tmp_path: Path) -> None:
    g = Graph("dtypes")
    count = 7
    values = unpack(np.random.default_rng(3).bytes(of.nbytes(count)), of, count)
    if of.is_bool:
        values = np.array([1, 0, 1, 1, 0, 0, 1], bool)
    g.param("w", (count,), of, values)
    g.param("empty", (0, 2), of, np.zeros((0, 2), of.np))
    g.constant(np.repeat(values, 300))
    save(g, tmp_path / "g")
    again = load(tmp_path / "g")
    assert again.param_values["w"].dtype == of.np and again.param_values["w"].tobytes() == values.tobytes()
    assert again.param_values["empty"].shape == (0, 2)
    assert again.nodes[2].attrs["value"] == g.nodes[2].attrs["value"]


def test_the_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    save(hello(), tmp_path / "a")
    save(hello(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arrays_are_aligned_in_the_file_and_in_memory(tmp_path: Path) -> None:
    g = Graph()
    for i in range(5):
        g.param(f"w{i}", (i + 1,), "f64", np.arange(i + 1.0))
    save(g, tmp_path / "g")
    assert all(v.ctypes.data % 64 == 0 for v in load(tmp_path / "g").param_values.values())


def test_strided_values_are_saved_in_order(tmp_path: Path) -> None:
    g = Graph()
    g.param("w", (3, 2), "f32", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    save(g, tmp_path / "g")
    assert load(tmp_path / "g").param_values["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    save(stateful(), tmp_path / "g")
    whole = (tmp_path / "g").read_bytes()
    for i in range(len(whole)):
        (tmp_path / "g").write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        with pytest.raises(FormatError):
            load(tmp_path / "g")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    save(stateful(), tmp_path / "g")
    whole = (tmp_path / "g").read_bytes()
    for i in [*range(0, len(whole), 7), len(whole) - 1]:
        (tmp_path / "g").write_bytes(whole[:i])
        with pytest.raises(FormatError):
            load(tmp_path / "g")
    (tmp_path / "g").write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match="truncated or damaged"):
        load(tmp_path / "g")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", 1)
    save(hello(), tmp_path / "g")
    monkeypatch.undo()
    with pytest.raises(
        FormatError, match="format version 1, but this RLX reads version 2; save the graph again"
    ):
        load(tmp_path / "g")


@pytest.mark.parametrize("kind", [GRAPH, PLAN, PROGRAM], ids=lambda kind: kind.begins)
def test_a_file_is_known_by_its_first_bytes(kind: Kind, tmp_path: Path) -> None:
    """Kinds share one layout; a reader takes its own kind only, and no other reader takes it for a model."""
    container.write(tmp_path / "any", kind, {}, {"text": b"hello"}, [np.arange(3)])
    found = container.File(tmp_path / "any", kind)
    found.check_all()
    assert found.facts == {} and found.part("text") == b"hello" and found.array(0).tolist() == [0, 1, 2]
    for other in {GRAPH, PLAN, PROGRAM} - {kind}:
        with pytest.raises(FormatError, match=f"not a {other.what}; it should begin with the bytes"):
            container.File(tmp_path / "any", other)
    assert "RLX" in str(what_else(kind.mark)) or "plan" in str(what_else(kind.mark))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(hello(), tmp_path / "g")
    before = (tmp_path / "g").read_bytes()

    def broken(file: Any, *_: Any) -> Any:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container, "write_to", broken)
    with pytest.raises(FormatError, match=r"cannot write .*: No space left on device"):
        save(stateful(), tmp_path / "g")
    assert (tmp_path / "g").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot read .*missing: No such file"):
        load(tmp_path / "missing")
    with pytest.raises(FormatError, match="cannot write"):
        save(hello(), tmp_path / "no" / "such" / "folder")


# -- files with a right checksum and a wrong content


Change = Callable[[dict[str, Any], dict[str, bytes]], Any]


def forge(path: Path, change: Change) -> None:
    """Rewrite a file's header and parts, with right checksums; a change may give another header."""
    header, parts, arrays = taken_apart(path, GRAPH)
    changed = change(header, parts)
    whole = put_together(GRAPH, header, parts, arrays)
    path.write_bytes(with_header(GRAPH, changed.encode(), b"", b"") if isinstance(changed, str) else whole)


def array_field(index: int, value: Any) -> Change:
    return lambda header, parts: header["arrays"][0].__setitem__(index, value)


def table(value: Any) -> Change:
    return lambda header, parts: header.update(params=value)


def source(old: str, new: str) -> Change:
    return lambda header, parts: parts.update(source=parts["source"].replace(old.encode(), new.encode()))


NOT_READ = "array 0 has a description that RLX cannot read"
FORGED: list[tuple[str, Change, str]] = [
    ("not JSON", lambda h, p: "{", "its header is malformed; it is damaged"),
    ("a list", lambda h, p: "[]", "its header is malformed"),
    ("deep", lambda h, p: "[" * 100_000, "its header is malformed"),
    ("no text", lambda h, p: p.pop("source"), "it has no part 'source'"),
    ("no table", lambda h, p: h.pop("params"), "its header has no sound params"),
    ("table", table([0]), "its header has no sound params"),
    ("number", table({"w": "0"}), "it has no array 0"),
    ("float number", table({"w": 0.0}), "it has no array 0.0"),
    ("no such array", table({"w": 99}), "it has no array 99"),
    ("negative number", table({"w": -1}), "it has no array -1"),
    ("entry", lambda h, p: h["arrays"].__setitem__(0, "f32"), NOT_READ),
    ("dtype", array_field(0, "f33"), "array 0: "),
    ("shape", array_field(1, [2, "x"]), NOT_READ),
    ("float shape", array_field(1, [2.5, 4]), NOT_READ),
    ("negative", array_field(1, [-4, -2]), NOT_READ),
    ("huge", array_field(1, [10**30]), "array 0 has an impossible shape"),
    ("huge and empty", array_field(1, [10**30, 0]), "array 0 has an impossible shape"),
    ("large", array_field(1, [10**6]), "array 0 is not inside the file"),
    ("offset", array_field(2, 1 << 60), "array 0 is not inside the file"),
    ("unaligned", array_field(2, 4), "array 0 is not inside the file"),
    ("other shape", array_field(1, [2, 4]), "does not hold a valid graph"),
    ("other name", table({"v": 0}), "a value for 'v', but no such param or state"),
    ("text", lambda h, p: p.update(source=b"graph"), "does not hold a valid graph: expected a string"),
    ("not text", lambda h, p: p.update(source=b"\xff"), "part 'source' is not text"),
    ("op", source("gelu", "gulp"), "unknown op 'gulp'"),
]


@pytest.mark.parametrize(("change", "says"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_a_sound_file_with_wrong_content_is_refused(change: Change, says: str, tmp_path: Path) -> None:
    save(hello(), tmp_path / "g")
    forge(tmp_path / "g", lambda header, parts: None)
    load(tmp_path / "g")
    forge(tmp_path / "g", change)
    with pytest.raises(FormatError) as caught:
        load(tmp_path / "g")
    assert says in str(caught.value)
