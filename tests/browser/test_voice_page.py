"""Voice activity in the browser: the curve of a WAV file is that of Python; the microphone draws one, too."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from chromium import Browser, served
from in_node import WEB, in_node
from rlx.cli.main import main
from rlx.zoo.media import read_wav

CHUNK, CONTEXT = 512, 64
READ = """
import fs from "node:fs";
import { readWav, resampled } from "./audio.mjs";
const found = {};
for (const name of JSON.parse(fs.readFileSync("names.json", "utf-8"))) {
  const raw = fs.readFileSync(name);
  try {
    const { rate, samples } = readWav(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
    found[name] = [rate, Array.from(samples), resampled(samples, rate, 8000).length];
  } catch (error) { found[name] = error.message; }
}
console.log(JSON.stringify(found));
"""


def write_wav(path: Path, values: np.ndarray, channels: int, rate: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(values.itemsize)
        file.setframerate(rate)
        file.writeframes(values.tobytes())


def test_wav_files_are_read_as_in_python(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("node")
    rng = np.random.default_rng(0)
    write_wav(tmp_path / "a.wav", rng.integers(-(2**15), 2**15, 1001).astype("<i2"), 1, 16000)
    write_wav(tmp_path / "b.wav", rng.integers(0, 256, 1000).astype("u1"), 2, 44100)
    write_wav(tmp_path / "c.wav", rng.integers(-(2**31), 2**31, 999).astype("<i4"), 3, 8000)
    (tmp_path / "d.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:-7])  # cut off
    (tmp_path / "e.wav").write_bytes(b"RIFF\0\0\0\0WAVEdata")
    (tmp_path / "f.wav").write_bytes(b"OggS")
    (tmp_path / "names.json").write_text(json.dumps([f"{name}.wav" for name in "abcdef"]))
    (tmp_path / "audio.mjs").write_bytes((WEB / "audio.mjs").read_bytes())
    found = in_node(tmp_path, READ)
    for name, rate in {"a.wav": 16000, "b.wav": 44100, "c.wav": 8000}.items():
        want = read_wav(tmp_path / name)
        assert found[name][0] == rate and found[name][2] == int(len(want) * 8000 / rate)  # type: ignore[call-overload]
        np.testing.assert_allclose(found[name][1], want, atol=1e-6)  # type: ignore[call-overload]
    assert len(found["d.wav"][1]) == 997  # type: ignore[call-overload]
    assert found["e.wav"] == "this WAV file has no sound"  # type: ignore[call-overload]
    assert found["f.wav"] == "this is not a WAV file"  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def folder(require, zoo_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    require("browser")
    zoo_path("silero-op15")
    there = tmp_path_factory.mktemp("voice")
    assert main(["export", "zoo:silero-op15", "--wasm", str(there), "--page"]) == 0
    return there


@pytest.mark.parametrize("threads", [1, 2])
def test_the_curve_is_that_of_python(
    browser: Browser, folder: Path, zoo_path: Callable[..., Path], threads: int
) -> None:
    sound = zoo_path("beckett")
    samples = read_wav(sound)
    chunks = np.pad(samples, (0, -len(samples) % CHUNK)).reshape(-1, CHUNK)
    stream = rlx.load("zoo:silero-op15", states={"state": "stateN"}, threads=1).stream()
    before, want = np.zeros(CONTEXT, np.float32), []
    for chunk in chunks:
        given = np.concatenate([before, chunk])[None].astype(np.float32)
        want.append(float(stream.step({"input": given, "sr": np.array(16000)})["output"][0, 0]))
        before = given[0, CHUNK:]
    with served(folder) as url:
        browser.open(f"{url}?threads={threads}")
        browser.wait("#status", f"^Ready, with {threads} thread")
        browser.type("#file", str(sound))
        browser.wait("#time", r"^10\.0 s of sound")
        shown = [float(value) for value in browser.text("#values").split(",")]
        np.testing.assert_allclose(shown, want, atol=2e-3)
        assert browser.text("#found").startswith("Speech: 0.4 to 1.2 s, ")
        browser.type("#file", str(folder / "page.json"))
        assert browser.wait("#error", ".") == "this is not a WAV file"


def test_the_microphone_draws_a_curve(browser: Browser, folder: Path) -> None:
    with served(folder) as url:
        browser.open(url)
        browser.wait("#status", "^Ready")
        browser.click("#microphone")
        browser.wait("#microphone", "Stop")
        browser.until("document.querySelector('#values').textContent.split(',').length > 5")
        browser.click("#microphone")
        browser.wait("#microphone", "Microphone")
        values = [float(value) for value in browser.text("#values").split(",")]
        assert all(0 <= value <= 1 for value in values)
