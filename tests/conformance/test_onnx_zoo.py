"""Trained models of the zoo on real input, at several sizes of one program, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import rlx  # noqa: E402
from rlx.cli.inputs import _read_wav  # noqa: E402
from rlx.cli.png import read_png  # noqa: E402

ZooPath = Callable[..., Path]
Feeds = Iterator[dict[str, np.ndarray]]

def page(zoo_path: ZooPath) -> np.ndarray:
    """A scanned page of text, [height, width, 3] in 0 .. 1."""
    pixels = np.asarray(read_png(zoo_path("page")), np.float32) / 255
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    return np.repeat(pixels[..., :1], 3, axis=2)


def speech(zoo_path: ZooPath) -> np.ndarray:
    """Someone speaking, as mono samples."""
    samples = _read_wav(zoo_path("beckett"))
    return np.ascontiguousarray(samples.reshape(len(samples), -1)[:, 0], np.float32)


def planes(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """A piece of an image as [1, 3, height, width] in -1 .. 1."""
    piece = np.tile(image, (-(-height // image.shape[0]), -(-width // image.shape[1]), 1))[:height, :width]
    return np.ascontiguousarray(piece.transpose(2, 0, 1)[None] * 2 - 1)


def ocr_pages(zoo_path: ZooPath) -> Feeds:
    image = page(zoo_path)
    for height, width in ((160, 320), (192, 224)):
        yield {"x": planes(image, height, width)}


def ocr_lines(zoo_path: ZooPath) -> Feeds:
    image = page(zoo_path)
    for top, width in ((0, 320), (60, 192)):
        yield {"x": planes(image[top:], 48, width)}


def sounds(zoo_path: ZooPath) -> Feeds:
    samples, rng = speech(zoo_path), np.random.default_rng(0)
    for batch in (1, 2):
        pieces = [samples[16000 + 576 * i : 16576 + 576 * i] for i in range(batch)]
        state = rng.standard_normal((2, batch, 128)).astype(np.float32) * 0.1
        yield {"input": np.stack(pieces), "state": state, "sr": np.array(16000)}


def spoken(zoo_path: ZooPath) -> Feeds:
    samples = speech(zoo_path)
    for length in (32000, 50000):
        yield {"waveforms": samples[None, :length], "waveforms_lens": np.array([length - 1000])}


def notes(zoo_path: ZooPath) -> Feeds:
    samples = speech(zoo_path)
    for batch in (1, 2):
        yield {"serving_default_input_2:0": np.stack([samples[i : i + 43844, None] for i in range(batch)])}


def pictures(zoo_path: ZooPath) -> Feeds:
    image = (planes(page(zoo_path), 224, 224)[0].transpose(1, 2, 0) + 1) * 127.5
    mean = np.array([104, 117, 123], np.float32)
    for batch in (1, 2):
        yield {"input:0": np.stack([np.roll(image, 20 * i, 0) - mean for i in range(batch)])}


def files(zoo_path: ZooPath) -> Feeds:
    text = np.frombuffer(Path(__file__).read_bytes()[:2048], np.uint8).astype(np.int32)
    for batch in (1, 3):
        yield {"bytes": np.stack([np.roll(text, i) for i in range(batch)])}


MODELS: dict[str, Callable[[ZooPath], Feeds]] = {
    "magika": files,
    "silero-ifless": sounds,
    "silero-op15": sounds,
    "ppocr-det": ocr_pages,
    "ppocr-rec": ocr_lines,
    "ppocr-cls": ocr_lines,
    "basic-pitch": notes,
    "whisper80": spoken,
    "whisper80-conv": spoken,
    "open-nsfw": pictures,
}


@pytest.mark.parametrize("id", MODELS)
def test_model(id: str, zoo_path: ZooPath, record_property: Callable[[str, Any], None]) -> None:
    path = zoo_path(id)
    program = rlx.compile(rlx.from_onnx(path))
    assert not program.stats["host_thunks"]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {node.attrs["name"] for node in program.inputs}
    worst = 0.0
    for feed in MODELS[id](zoo_path):
        want = session.run(None, feed)
        got = program.run({k: v for k, v in feed.items() if k in inputs})
        for w, g in zip(want, got.values(), strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            worst = max(worst, float(np.abs(w.astype(np.float64) - g).max()))
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=5e-4)
    record_property("max_error", worst)
