"""Trained models of the zoo on real input, each at the size it is mostly used at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx_bench.workloads.base import Workload
from rlx_bench.workloads.models import minilm_on

SENTENCE = (
    "The model arrives as a file, is checked, simplified, fused and laid out in memory, and leaves as one "
    "native program that says what it does, why it does it so, and how long every part of it took."
)

PEERS = ("onnxruntime", "openvino")
TOLERANCE = {"whisper80": 2e-3}
"""Where ONNX Runtime is the rougher one: its STFT sums term by term in f32. The conv twin agrees to 1e-5."""


def sentence() -> Workload:
    """MiniLM on a sentence, as its tokenizer cuts it."""
    from tokenizers import Tokenizer

    from rlx import zoo

    tokenizer = Tokenizer.from_file(str(zoo.fetch("minilm").parent / "tokenizer.json"))
    tokenizer.no_padding()
    ids = np.array([tokenizer.encode(SENTENCE).ids], np.int64)
    return minilm_on("minilm", {"input_ids": ids, "attention_mask": np.ones_like(ids)}, peers=PEERS)


def trained(id: str) -> Workload:
    """An ONNX model of the zoo."""
    from rlx import zoo
    from rlx.zoo.samples import feeds

    path = zoo.fetch(id)

    def model() -> Any:
        import onnx

        return onnx.load(str(path))

    return Workload(
        id,
        feeds(id)[0],
        PEERS,
        model,
        path=path,
        tolerance=TOLERANCE.get(id, 1e-4),
        in_mean=not id.startswith("whisper80"),
    )


IDS = (
    "magika",
    "silero-ifless",
    "silero-op15",
    "ppocr-det",
    "ppocr-rec",
    "ppocr-cls",
    "basic-pitch",
    "whisper80",
    "whisper80-conv",
    "open-nsfw",
)
MAKERS: dict[str, Callable[[], Workload]] = {
    "zoo-minilm": sentence,
    **{f"zoo-{id}": functools.partial(trained, id) for id in IDS},
}
