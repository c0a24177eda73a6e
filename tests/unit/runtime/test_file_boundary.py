"""Whatever reading a file raises is a FormatError; nothing hangs or takes more than the file has."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_models import network

import rlx
from rlx.api.compile import plan
from rlx.cli.inputs import from_file
from rlx.errors import FormatError, RlxError
from rlx.fuzz.containers import put_together
from rlx.ir.text.container import PLAN
from rlx.ir.types import parse_type
from rlx.plan import files as plans
from rlx.plan.lir import LirModule
from rlx.runtime.store import trust


def plan_file(path: Path, parts: dict[str, bytes], **header: Any) -> Path:
    """A binary plan with right checksums."""
    tables: dict[str, Any] = {"params": {}, "states": {}, "derived": {}, "blobs": {}, "arrays": []}
    path.write_bytes(put_together(PLAN, tables | header, parts, b""))
    return path


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}"


def peak_of(code: str) -> int:
    """Bytes that a process of its own took at most."""
    told = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run([sys.executable, "-c", code + told], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


def test_a_plan_that_claims_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """Nothing is packed: no array is larger than its file, and no room is made for what is not there."""
    text = str(plan(network())).encode()
    entry = ["u8", [1 << 39], 0]
    path = plan_file(tmp_path / "bomb.plan", {"plan": text}, arrays=[entry], blobs={"0" * 64: 0})
    assert path.stat().st_size < 2 << 20
    code = f"""
from rlx.errors import FormatError
from rlx.plan.lir import LirModule
try:
    LirModule.load({str(path)!r})
except FormatError as e:
    assert "array 0 is not inside the file" in str(e)
else:
    raise SystemExit("it was read")
"""
    assert peak_of(code) < 400 << 20


@pytest.mark.parametrize(
    ("parts", "header"),
    [
        ({}, {}),
        ({"plan": b""}, {}),
        ({"plan": b"\xff"}, {}),
        ({"plan": b"rlx plan 1\n"}, {"blobs": None}),
        ({"plan": b"rlx plan 1\n"}, {"blobs": {"a": 0}}),
        ({"plan": b"rlx plan 1\n"}, {"blobs": {"a": 0}, "arrays": [["object", [1], 0]]}),
    ],
    ids=["no text", "empty", "not text", "no table", "no array", "objects"],
)
def test_what_is_not_a_plan(parts: dict[str, bytes], header: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"bad\.plan"):
        LirModule.load(plan_file(tmp_path / "bad.plan", parts, **header))


def test_a_plan_still_goes_through_its_file(tmp_path: Path) -> None:
    module = plan(network())
    module.save(tmp_path / "a.plan")
    assert str(LirModule.load(tmp_path / "a.plan")) == str(module)


def test_damaged_lines_of_a_plan(tmp_path: Path) -> None:
    """A slot without its steps raised StopIteration."""
    path = tmp_path / "a.plan"
    plans.write_text(plan(network()), path)
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if " steps " in line)
    lines[at] = lines[at].partition(" steps ")[0] + " steps 0"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FormatError, match=r"a\.plan is not a valid plan"):
        LirModule.load(path)


def wav(channels: int, width: int, frames: int, data: bytes) -> bytes:
    """A sound whose header may say more than there is."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(8000)
        file.writeframes(data)
    raw = bytearray(out.getvalue())
    struct.pack_into("<HIIHH", raw, 22, channels, 8000, 8000, channels * width, 8 * width)
    struct.pack_into("<I", raw, 40, frames)
    return bytes(raw)


def png(width: int, height: int) -> bytes:
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    body = b"".join(struct.pack(">I4s", len(b), k) + b + bytes(4) for k, b in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.npy", npy(HUGE)),
        ("a.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}")),
        ("a.npy", npy("{" * 100)),
        ("a.npy", b""),
        ("a.wav", wav(3, 2, 20, bytes(7))),
        ("a.wav", wav(1, 2, 0xFFFFFFF0, bytes(7))),
        ("a.wav", wav(0, 1, 20, bytes(8))),
        ("a.wav", b"RIFF"),
        ("a.png", png(1 << 14, 1 << 14)),
        ("a.png", png(2, 2)),
        ("a.png", b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 1 << 31, b"IDAT")),
    ],
)
def test_inputs_that_are_damaged(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    try:
        made = from_file(path, parse_type("f32[n]" if name != "a.png" else "u8[1,3,h,w]"), {})
    except RlxError as e:
        assert name in str(e)
    else:
        assert made.nbytes <= 8 * len(data)


@pytest.mark.parametrize(
    "read",
    [
        rlx.load,
        rlx.from_onnx,
        LirModule.load,
        lambda path: from_file(path.rename(path.with_suffix(".npy")), parse_type("f32[n]"), {}),
        lambda path: from_file(path.rename(path.with_suffix(".png")), parse_type("u8[1,3,4,4]"), {}),
        lambda path: from_file(path.rename(path.with_suffix(".wav")), parse_type("f32[n]"), {}),
        trust.load_or_create,
    ],
    ids=["load", "from_onnx", "plan", "npy", "png", "wav", "key"],
)
def test_a_pipe_is_not_waited_for(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises((RlxError, OSError), match="not a plain file"):
        read(path)


def test_a_pipe_as_key_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "rlx").mkdir()
    os.mkfifo(tmp_path / "rlx" / "native.key", 0o600)
    code = "import numpy as np, rlx\nprint(rlx.jit(lambda x: x * 2)(np.ones(2, np.float32)))"
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "RLX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.stdout.strip() == "[2. 2.]", done.stderr
    assert "it is not a plain file" in done.stderr


def test_no_array_of_a_folder_beside_a_plan_escapes(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    plans.write_text(plan(network()), path)
    folder = tmp_path / "a.plan.blobs"
    folder.mkdir(exist_ok=True)
    (folder / ("0" * 64 + ".f32.npy")).write_bytes(npy(HUGE))
    with pytest.raises(FormatError, match=r"f32\.npy is not a valid array"):
        LirModule.load(path)


def test_arrays_of_all_kinds_are_read(tmp_path: Path) -> None:
    for array in (np.arange(6).reshape(2, 3).T, np.float16(2), np.zeros((0, 3), "c8"), np.ones(3, bool)):
        np.save(tmp_path / "a.npy", array)
        found = from_file(tmp_path / "a.npy", parse_type("f32[n]"), {})
        np.testing.assert_array_equal(found, array)
