"""Commands that take a model: run, compile, explain, diff, trust; and what they do with bad input."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import wave
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx.cli.inputs import image_tensor, make_inputs
from rlx.cli.main import main
from rlx.errors import FormatError, InputError
from rlx.ir.types import parse_type
from rlx.zoo.media import read_png

GRAPH = """graph "scale" {
  %0 = input() {name="x", type=f32[batch,4]}
  %1 = constant() {value=f32[]{2.0}}
  %2 = mul(%0, %1)
  %3 = exp(%2)
  output "y" = %3
}
"""


@pytest.fixture(autouse=True)
def demo_packages(require) -> None:  # type: ignore[no-untyped-def]
    require("demo")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A graph as text: y = exp(2 * x)."""
    path = tmp_path / "scale.txt"
    path.write_text(GRAPH)
    return str(path)


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    found: dict = json.loads(capsys.readouterr().out)  # type: ignore[type-arg]
    return found


# -- run


def test_run_on_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    np.save(tmp_path / "x.npy", x)
    assert main(["run", model, "--input", "x=x.npy", "--out", "results", "--repeat", "3"]) == 0
    out = capsys.readouterr().out
    assert "float32[2,4]" in out and "median of 3" in out and "outputs in results" in out
    np.testing.assert_allclose(np.load(tmp_path / "results" / "y.npy"), np.exp(2 * x), rtol=1e-6)


def test_run_on_made_up_inputs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capsys, "run", model, "--bind", "batch=5", "--input", "x=ones", "--threads", "1")
    assert facts["inputs"]["x"] == {"dtype": "float32", "shape": [5, 4]}
    assert facts["outputs"]["y"]["min"] == pytest.approx(np.exp(2)) == facts["outputs"]["y"]["max"]
    assert facts["stats"]["threads"] == 1 and facts["stats"]["host_thunks"] == []
    assert len(facts["seconds"]) == 1
    same = [json_of(capsys, "run", model, "--seed", seed)["outputs"]["y"]["mean"] for seed in ("7", "7", "8")]
    assert same[0] == same[1] != same[2]


def test_run_writes_a_trace(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "--profile", "trace.json", "--threads", "2"]) == 0
    assert "Perfetto" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    runs = [e for e in events if e.get("cat") == "run"]
    assert len(runs) == 3 and "mul + exp" in kernels[0]["name"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[e["tid"]] for e in kernels} <= {"thread 0", "thread 1"}
    for k in kernels:
        assert any(r["ts"] <= k["ts"] and k["ts"] + k["dur"] <= r["ts"] + r["dur"] for r in runs)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "MODEL", "--input", "z=ones"], 1, "the model has no input 'z'; it has: x"),
        (["run", "MODEL", "--input", "x"], 2, "--input takes NAME=FILE"),
        (["run", "MODEL", "--bind", "batch=many"], 2, "--bind takes NAME=SIZE"),
        (["run", "MODEL", "--bind", "batches=3"], 1, "no symbol 'batches' to bind; it has: batch"),
        (["explain", "MODEL", "--assume", "batches=3"], 1, "its symbols: batch"),
        (["run", "MODEL", "--input", "x=missing.npy"], 1, "cannot read missing.npy"),
        (
            ["run", "MODEL", "--input", "x=x.mp3"],
            1,
            "cannot use 'x.mp3' as an input; give a .npy, .png or .wav file, or random, zeros, ones",
        ),
        (["run", "MODEL", "--input", "x=objects.npy"], 1, "objects.npy is not a valid array of numbers"),
        (["run", "MODEL", "--input", "x=pickle.npy"], 1, "pickle.npy is not a valid array of numbers"),
        (["run", "MODEL", "--input", "x=zipped.npy"], 1, "zipped.npy is not a valid array of numbers"),
        (["run", "MODEL", "--input", "x=words.npy"], 1, "words.npy holds elements of type <U1"),
        (["run", "MODEL", "--input", "x=records.npy"], 1, "save an array of numbers"),
        (["run", "MODEL", "--input", "x=whole.npy"], 1, "got dtype i64; cast it"),
        (["run", "MODEL", "--input", "x=flat.npy"], 1, "has rank 2 [batch,4], got shape [4]"),
        (["run", "MODEL", "--input", "x=garbage.wav"], 1, "garbage.wav is not a valid WAV sound"),
        (["run", "MODEL", "--input", "x=three.npy", "--bind", "batch=7"], 1, "batch = 3, but batch is 7"),
        (["run", "MODEL", "--bind", "batch=99999999999999"], 1, "not enough memory"),
        (["run", "MODEL", "--seed", "-1"], 2, "--seed"),
        (["bench", "--threads", "0", "softmax"], 2, "--threads"),
        (["bench", "--rounds", "0", "softmax"], 2, "--rounds"),
        (["run", "MODEL", "--threads", "0"], 2, "--threads"),
        (["run", "MODEL", "--target", "vax"], 1, "unknown target 'vax'"),
        (["run", "missing.onnx"], 1, "cannot read the model 'missing.onnx'"),
        (["run", "zoo:nothing"], 1, "the zoo has no model 'nothing'"),
        (["run", "."], 1, ". is a folder; give a file in it: garbage.rlx"),
        (["run", "garbage.rlx"], 1, "not a compiled program"),
        (["run", "garbage.txt"], 1, "expected"),
        (["run", "MODEL", "--profile", "no/such/folder/trace.json"], 1, "cannot write the trace"),
        (["run", "MODEL", "--out", "garbage.txt/sub"], 1, "cannot write outputs"),
        (["compile", "MODEL"], 2, "Missing option '--output'"),
        (["compile", "MODEL", "-o", "no/such/folder/m.rlx"], 1, "cannot write no/such/folder/m.rlx"),
        (["trust", "MODEL"], 1, "not a compiled program"),
        (["diff", "MODEL", "garbage.txt"], 1, "expected"),
        (["launch", "-n", "1", "missing.py"], 1, "there is no script 'missing.py'"),
        (["launch", "-n", "1", "--heap", "much", "missing.py"], 2, "'much' is not a size like 64M"),
    ],
)
def test_refusals(
    arguments: list[str],
    code: int,
    message: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "garbage.rlx").write_bytes(b"no program")
    (tmp_path / "garbage.txt").write_text("graph this is not")
    (tmp_path / "garbage.wav").write_bytes(b"no sound")
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps([1, 2]))
    np.save(tmp_path / "objects.npy", np.array([{}, 2], object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", x=np.ones(3))
    (tmp_path / "archive.npz").rename(tmp_path / "zipped.npy")
    arrays = {
        "words": np.array(["a", "b"]),
        "records": np.zeros(3, [("a", "f4")]),
        "whole": np.ones((3, 4), np.int64),
        "flat": np.ones(4, np.float32),
        "three": np.ones((3, 4), np.float32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert main([model if a == "MODEL" else a for a in arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert "Traceback" not in captured.err


def test_files_that_the_system_refuses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it happens: one line, no traceback."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere/secret")

    monkeypatch.setattr("rlx.cli.run.make_inputs", refuse)
    assert main(["run", model]) == 1
    assert capsys.readouterr().err == "rlx: cannot use somewhere/secret: Permission denied\n"


def test_narrow_floats_come_back_from_npy_files(tmp_path: Path) -> None:
    """NumPy writes them as raw bytes."""
    np.save(tmp_path / "x.npy", np.arange(4).astype(ml_dtypes.bfloat16))
    found = make_inputs({"x": parse_type("bf16[4]")}, {"x": str(tmp_path / "x.npy")}, {}, dict)["x"]
    assert found.dtype == ml_dtypes.bfloat16 and found.tolist() == [0, 1, 2, 3]


# -- compile, trust, explain, diff


def test_compile_then_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", model, "-o", "scale.rlx", "--also", "x86-64"]) == 0
    assert "1 kernel (1 distinct) and 0 host thunks" in capsys.readouterr().out
    facts = json_of(capsys, "run", "scale.rlx", "--input", "x=zeros")
    assert facts["outputs"]["y"]["max"] == 1.0 and facts["notes"] == []


def test_a_file_of_somebody_else(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", model, "-o", "scale.rlx"]) == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    capsys.readouterr()
    with pytest.warns(UserWarning, match="not signed by this user"):
        assert "was not run" in json_of(capsys, "run", "scale.rlx")["notes"][0]
    assert json_of(capsys, "run", "scale.rlx", "--trust-native")["notes"] == []
    assert json_of(capsys, "trust", "scale.rlx")["file"] == "scale.rlx"
    assert len(json_of(capsys, "trust", "--verify", "scale.rlx")["targets"]) == 1
    assert json_of(capsys, "run", "scale.rlx")["notes"] == []


def test_explain_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capsys, "explain", model, "--bind", "batch=10")
    assert facts["binding"] == {"batch": 10} and facts["memory"]["output"] == 192
    assert [k["type"] for k in facts["kernels"]] == ["f32[batch,4]"]
    assert facts["decisions"][0]["verdict"] is True
    (kernel,) = facts["kernels"]
    assert kernel["bytes"] == 2 * 10 * 4 * 4 and kernel["predicted_ns"] > 0 and kernel["operations"] > 0
    assert kernel["on_host_because"] is None


def test_explain_prints_the_assembly_of_a_kernel(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the name in explain's table, with or without the percent sign; the same from the store."""
    (kernel,) = json_of(capsys, "explain", model)["kernels"]
    name = f"%{kernel['node']}"
    assert main(["explain", model]) == 0
    assert f"  {name} map: mul, exp -> " in capsys.readouterr().out
    assert main(["explain", model, "--asm", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# kernel {name} of scale for ") and "\nk0:\n" in shown and "ret" in shown
    assert main(["explain", model, "--asm", name[1:], "--no-cache"]) == 0
    assert capsys.readouterr().out == shown
    assert json_of(capsys, "explain", model, "--asm", name) == {name: shown.removesuffix("\n")}


def test_diff(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text(Path(model).read_text().replace("exp", "tanh"))
    assert main(["diff", model, model]) == 0
    assert capsys.readouterr().out == f"no difference: {model} and {model} have the same graph\n"
    assert main(["diff", model, str(other)]) == 3
    out = capsys.readouterr().out
    assert "-  %3 = exp(%2)" in out and "+  %3 = tanh(%2)" in out
    assert main(["diff", model, str(other), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["same"] is False


def test_diff_of_plans(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels, traffic, memory, outputs: by text files, by models, by both."""
    other = tmp_path / "other.txt"
    other.write_text(Path(model).read_text().replace("exp", "tanh"))
    a, b = tmp_path / "a.plan", tmp_path / "b.plan"
    for source, target in ((model, a), (str(other), b)):
        assert main(["compile", source, "-o", str(target)]) == 0
    assert "a plan for" in capsys.readouterr().out
    assert a.read_text().startswith("rlx plan 1\n")
    assert main(["diff", str(a), str(a)]) == 0
    assert capsys.readouterr().out == f"no difference: {a} and {a} have the same plan\n"
    assert main(["diff", str(a), str(b)]) == 3
    out = capsys.readouterr().out
    assert "kernels " in out and "traffic " in out and "predicted " in out
    assert any(line.startswith("-") and "exp" in line for line in out.splitlines())
    assert any(line.startswith("+") and "tanh" in line for line in out.splitlines())
    assert main(["diff", model, str(b)]) == 3
    assert capsys.readouterr().out == out
    assert main(["diff", "--plan", model, str(other)]) == 3
    assert capsys.readouterr().out == out
    assert main(["run", str(a)]) == 1
    assert "is a plan, which has no model to run; compare it with rlx diff" in capsys.readouterr().err


def test_a_plan_is_for_one_target(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", model, "-o", str(tmp_path / "a.plan"), "--also", "x86-64"]) == 2
    assert "holds the plan for one target" in capsys.readouterr().err


# -- the rest


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "devices")
    assert found["devices"][0]["name"] == "cpu" and found["devices"][0]["available"]
    assert sum(t["host"] for t in found["targets"]) == 1
    assert main(["devices"]) == 0
    assert "no driver for cuda" in capsys.readouterr().out


def test_cache_info_and_clear(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    json_of(capsys, "run", model)
    found = json_of(capsys, "cache", "info")
    assert found["code"]["entries"] > 0 and found["code"]["bytes"] > 0
    assert json_of(capsys, "cache", "clear")["deleted"]["code"] == found["code"]["entries"]
    assert json_of(capsys, "cache", "info")["code"]["entries"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are Linux processes")
def test_launch_hands_on_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import os, sys; sys.exit(0 if sys.argv[1:] == ['--fine', 'yes'] else 7)")
    assert main(["launch", "-n", "2", str(script), "--fine", "yes"]) == 0
    assert main(["launch", "-n", "1", str(script)]) == 7


# -- inputs from images and sounds


def png(path: Path, pixels: np.ndarray, filters: list[int]) -> Path:
    """Write a PNG by the specification, with the given filter for every row."""
    height, width, channels = pixels.shape
    above, rows = np.zeros(width * channels, np.int64), b""
    for row, kind in zip(pixels.reshape(height, -1).astype(np.int64), filters, strict=True):
        left = np.concatenate([np.zeros(channels, np.int64), row[:-channels]])
        corner = np.concatenate([np.zeros(channels, np.int64), above[:-channels]])
        p = left + above - corner
        choice = np.where(abs(p - above) <= abs(p - corner), above, corner)
        nearest = (abs(p - left) <= abs(p - above)) & (abs(p - left) <= abs(p - corner))
        paeth = np.where(nearest, left, choice)
        guess = [0 * row, left, above, (left + above) // 2, paeth][kind]
        rows += bytes([kind]) + ((row - guess) % 256).astype(np.uint8).tobytes()
        above = row

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_with_every_filter(channels: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 7, channels)).astype(np.uint8)
    read = read_png(png(tmp_path / "a.png", pixels, [0, 1, 2, 3, 4] * 2))
    assert np.array_equal(read, pixels[:, :, : 1 if channels < 3 else 3])


def test_damaged_png_is_refused(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 1)).astype(np.uint8)
    good = png(tmp_path / "a.png", pixels, [0] * 5).read_bytes()
    for size in range(len(good) - 24):  # after the pixels come only checksums and the end
        (tmp_path / "a.png").write_bytes(good[:size])
        with pytest.raises(FormatError, match="not a valid PNG image"):
            read_png(tmp_path / "a.png")


def test_zoo_image(zoo_path) -> None:  # type: ignore[no-untyped-def]
    pixels = read_png(zoo_path("page"))
    assert pixels.shape == (191, 384, 1) and 0 < pixels.mean() < 255


def test_image_layouts() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    nchw = image_tensor(pixels, parse_type("f32[1,3,h,w]"), {}, "x")
    assert np.array_equal(nchw[0].transpose(1, 2, 0), pixels / np.float32(255))
    assert np.array_equal(image_tensor(pixels, parse_type("u8[n,h,w,3]"), {}, "x")[0], pixels)
    assert image_tensor(pixels, parse_type("f32[1,1,8,6]"), {}, "x").shape == (1, 1, 8, 6)
    assert image_tensor(pixels, parse_type("f32[3,h,w]"), {"w": 3}, "x").shape == (3, 4, 3)
    flat = image_tensor(np.full((5, 5, 3), 77, np.uint8), parse_type("u8[9,3,3]"), {}, "x")
    assert flat.shape == (9, 3, 3) and (flat == 77).all()
    with pytest.raises(InputError, match="does not fit an input"):
        image_tensor(pixels, parse_type("f32[2,7]"), {}, "x")


def test_sounds(tmp_path: Path) -> None:
    samples = np.array([[0, 0], [16384, -16384], [-32768, -32768]], "<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    given = {"s": str(tmp_path / "a.wav")}
    free = make_inputs({"s": parse_type("f32[1,n]")}, given, {}, dict)
    assert free["s"].tolist() == [[0.0, 0.0, -1.0]]
    fixed = make_inputs({"s": parse_type("f32[5]")}, given, {}, dict)
    assert fixed["s"].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0]
    with pytest.raises(InputError, match="does not fit"):
        make_inputs({"s": parse_type("f32[2,n]")}, given, {}, dict)


def test_files_decide_open_sizes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 9), np.int64))
    texts = {"mask": "bool[batch,seq]", "ids": "i64[batch,seq]", "z": "c64[k]"}
    types = {name: parse_type(text) for name, text in texts.items()}
    made = make_inputs(
        types, {"ids": str(tmp_path / "a.npy")}, {}, lambda sizes: {"seq": 128, "k": 3, **sizes}
    )
    assert [a.shape for a in made.values()] == [(2, 9), (2, 9), (3,)] and list(made) == list(types)
    assert made["mask"].dtype == np.bool_ and made["z"].dtype == np.complex64
