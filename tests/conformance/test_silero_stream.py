"""silero-vad over the chunks of a recording: a stream does what passing the state by hand does."""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import rlx
from conformance.ort_session import open_session

pytestmark = pytest.mark.usefixtures("each_origin")

CHUNK, CONTEXT = 512, 64


def chunks(path: Path) -> Iterator[np.ndarray]:
    """Chunks of a recording, each with the end of the one before it, as the model wants them."""
    with wave.open(str(path)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    before = np.zeros(CONTEXT, np.float32)
    for start in range(0, len(sound) - CHUNK + 1, CHUNK):
        chunk = sound[start : start + CHUNK]
        yield np.concatenate([before, chunk])[None]
        before = chunk[-CONTEXT:]


@pytest.mark.parametrize("id", ["silero-ifless", "silero-op15"])
def test_streaming_equals_the_whole_file(id: str, zoo_path: Callable[[str], Path]) -> None:
    path, sound = zoo_path(id), list(chunks(zoo_path("beckett")))
    plain = rlx.load(path, cache=False)
    program = rlx.load(path, states={"state": "stateN"}, cache=False)
    assert program.output_names == ["output"]
    streams = [program.stream(), program.stream()]
    session = _onnxruntime(path)
    state = np.zeros((2, 1, 128), np.float32)
    rate = {"sr": np.array(16000)}
    theirs = state
    spoken = 0
    for number, x in enumerate(sound):
        given = {"input": x, **{k: v for k, v in rate.items() if k in program.input_names}}
        whole = plain.run({**given, "state": state})
        state = whole["stateN"]
        got = streams[0].step(given)["output"]
        np.testing.assert_array_equal(got, whole["output"])
        if number % 3 == 0:
            streams[1].step(given)  # another listener who hears less: nobody minds
        if session is not None:
            want, theirs = session.run(None, {"input": x, "state": theirs, **rate})
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=5e-4)
        spoken += bool(got[0, 0] > 0.5)
    np.testing.assert_array_equal(streams[0].state("state").read(), state)
    assert len(sound) // 4 < spoken < len(sound)  # a man reads, with pauses
    streams[0].reset()
    given = {"input": sound[0], **{k: v for k, v in rate.items() if k in program.input_names}}
    first = plain.run({**given, "state": np.zeros((2, 1, 128), np.float32)})
    np.testing.assert_array_equal(streams[0].step(given)["output"], first["output"])


def _onnxruntime(path: Path):  # type: ignore[no-untyped-def]
    try:
        return open_session(path)
    except ImportError:
        return None
