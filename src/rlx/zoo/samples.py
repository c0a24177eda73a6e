"""Real input for the models of the zoo: a scanned page, someone speaking, text; at several sizes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rlx.errors import ZooError
from rlx.zoo import fetch
from rlx.zoo.media import read_png, read_wav

Feed = dict[str, np.ndarray]


def page() -> np.ndarray:
    """A scanned page of text, [height, width, 3] in 0 .. 1."""
    pixels = np.asarray(read_png(fetch("page")), np.float32) / 255
    return np.repeat(pixels[..., :1], 3, axis=2)


def speech() -> np.ndarray:
    """Someone speaking, as mono samples."""
    return np.ascontiguousarray(read_wav(fetch("beckett")))


def _planes(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """A piece of an image as [1, 3, height, width] in -1 .. 1; a smaller image is repeated."""
    piece = np.tile(image, (-(-height // image.shape[0]), -(-width // image.shape[1]), 1))[:height, :width]
    return np.ascontiguousarray(piece.transpose(2, 0, 1)[None] * 2 - 1)


def _pages() -> Iterator[Feed]:
    for height, width in ((192, 384), (160, 320), (192, 224)):
        yield {"x": _planes(page(), height, width)}


def _lines() -> Iterator[Feed]:
    for top, width in ((0, 320), (60, 192)):
        yield {"x": _planes(page()[top:], 48, width)}


def _chunks() -> Iterator[Feed]:
    samples, generator = speech(), np.random.default_rng(0)
    for batch in (1, 2):
        pieces = [samples[16000 + 576 * i : 16576 + 576 * i] for i in range(batch)]
        state = generator.standard_normal((2, batch, 128)).astype(np.float32) * np.float32(0.1)
        yield {"input": np.stack(pieces), "state": state, "sr": np.array(16000)}


def _chunks_at_both_rates() -> Iterator[Feed]:
    for feed in _chunks():
        yield feed
        half = np.ascontiguousarray(feed["input"][:, ::2])  # its own branch, of other sizes
        yield {**feed, "input": half, "sr": np.array(8000)}


def _recordings() -> Iterator[Feed]:
    samples = speech()
    for length in (80000, 32000, 50000):
        yield {"waveforms": samples[None, :length].copy(), "waveforms_lens": np.array([length - 1000])}


def _music() -> Iterator[Feed]:
    samples = speech()
    for batch in (1, 2):
        yield {"serving_default_input_2:0": np.stack([samples[i : i + 43844, None] for i in range(batch)])}


def _pictures() -> Iterator[Feed]:
    image = (_planes(page(), 224, 224)[0].transpose(1, 2, 0) + 1) * 127.5
    mean = np.array([104, 117, 123], np.float32)
    for batch in (1, 2):
        yield {"input:0": np.ascontiguousarray([np.roll(image, 20 * i, 0) - mean for i in range(batch)])}


def _files() -> Iterator[Feed]:
    text = np.frombuffer(Path(__file__).read_bytes()[:2048], np.uint8).astype(np.int32)
    for batch in (1, 3):
        yield {"bytes": np.stack([np.roll(text, i) for i in range(batch)])}


FEEDS: dict[str, Callable[[], Iterator[Feed]]] = {
    "magika": _files,
    "silero-ifless": _chunks,
    "silero-op15": _chunks,
    "silero": _chunks_at_both_rates,
    "ppocr-det": _pages,
    "ppocr-rec": _lines,
    "ppocr-cls": _lines,
    "basic-pitch": _music,
    "whisper80": _recordings,
    "whisper80-conv": _recordings,
    "open-nsfw": _pictures,
}


def feeds(id: str) -> list[Feed]:
    """Inputs of an ONNX model of the zoo, of different sizes; the first is of the size it is mostly used at.

    >>> feeds("silero-op15")[0]["input"].shape  # doctest: +SKIP
    (1, 576)
    """
    if id not in FEEDS:
        raise ZooError(f"the zoo has no samples for {id!r}; it has them for {', '.join(FEEDS)}")
    return list(FEEDS[id]())
