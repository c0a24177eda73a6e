"""Graphs in files: everything comes back, and damage of any kind is noticed."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_graphs import GRAPHS, hello, stateful
from test_text import same

from rlx.errors import FormatError
from rlx.ir.dtype import ALL_DTYPES, DType, unpack
from rlx.ir.graph import Graph
from rlx.ir.text import files as serialize
from rlx.ir.text.files import load, save


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_come_back(name: str, tmp_path: Path) -> None:
    g = GRAPHS[name]()
    save(g, tmp_path / "g")
    again = load(tmp_path / "g")
    same(g, again)
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
    monkeypatch.setattr(serialize, "VERSION", 2)
    save(hello(), tmp_path / "g")
    monkeypatch.undo()
    with pytest.raises(
        FormatError, match="format version 2, but this RLX reads version 1; save the graph again"
    ):
        load(tmp_path / "g")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(hello(), tmp_path / "g")
    before = (tmp_path / "g").read_bytes()

    def broken(*args: Any) -> Any:
        yield b"half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialize, "_pieces", broken)
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


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a file's header and sign it properly."""
    whole = path.read_bytes()
    prefix = struct.Struct("<8sIIQQ32s")
    size = prefix.unpack(whole[: prefix.size])[3]
    header = json.loads(whole[prefix.size : prefix.size + size])
    body = whole[-(-(prefix.size + size) // 64) * 64 :]
    changed = change(header)
    raw = (changed if isinstance(changed, str) else json.dumps(header)).encode()
    end = prefix.size + len(raw)
    rest = raw + b"\0" * (-end % 64) + body
    total = prefix.size + len(rest)
    digest = hashlib.sha256(prefix.pack(b"RLXGRAPH", 1, 0, len(raw), total, b"") + rest).digest()
    path.write_bytes(prefix.pack(b"RLXGRAPH", 1, 0, len(raw), total, digest) + rest)


def array_field(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header["arrays"][0].update({key: value})


FORGED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("not JSON", lambda h: "{", "its header is malformed; it is damaged"),
    ("a list", lambda h: "[]", "its header is malformed"),
    ("deep", lambda h: "[" * 100_000, "its header is malformed"),
    ("no text", lambda h: h.pop("text"), "its header is malformed"),
    ("kind", array_field("kind", "code"), "its header is malformed"),
    ("name", array_field("name", 3), "its header is malformed"),
    ("dtype", array_field("dtype", "f33"), "param 'w' has a description that RLX cannot read"),
    ("shape", array_field("shape", [2, "x"]), "has a description that RLX cannot read"),
    ("float shape", array_field("shape", [2.5, 4]), "has a description that RLX cannot read"),
    ("negative", array_field("shape", [-4, -2]), "is not inside the file"),
    ("huge", array_field("shape", [10**30]), "is not inside the file"),
    ("huge and empty", array_field("shape", [10**30, 0]), "is not inside the file"),
    ("offset", array_field("offset", 1 << 60), "is not inside the file"),
    ("unaligned", array_field("offset", 4), "is not inside the file"),
    ("other shape", array_field("shape", [2, 4]), "does not hold a valid graph"),
    ("other name", array_field("name", "v"), "a value for 'v', but no such param or state"),
    ("text", lambda h: h.update(text="graph"), "does not hold a valid graph: expected a string"),
    ("op", lambda h: h.update(text=h["text"].replace("gelu", "gulp")), "unknown op 'gulp'"),
]


@pytest.mark.parametrize(("change", "says"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_a_signed_lie_is_refused(change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path) -> None:
    save(hello(), tmp_path / "g")
    forge(tmp_path / "g", lambda header: None)
    load(tmp_path / "g")
    forge(tmp_path / "g", change)
    with pytest.raises(FormatError) as caught:
        load(tmp_path / "g")
    assert says in str(caught.value)
