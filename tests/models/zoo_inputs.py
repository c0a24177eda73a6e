"""Sizes and seeded inputs for models of the zoo, as their exports are tested."""

from __future__ import annotations

import numpy as np

from rlx.runtime.program import CompiledProgram

MODELS = {
    "minilm": {"batch": 2, "seq": 16},
    "magika": {"unk__214": 1},
    "silero": {"input.0": 1, "input.1": 576, "state.1": 1},
    "silero-ifless": {"batch": 1, "sequence": 576},
    "silero-op15": {"batch": 1, "sequence": 576},
    "ppocr-cls": {"x.0": 1, "x.2": 48, "x.3": 192},
    "ppocr-rec": {"p2o.DynamicDimension.0": 1, "x.2": 48, "p2o.DynamicDimension.1": 64},
    "ppocr-det": {"p2o.DynamicDimension.0": 1, "p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 64},
    "basic-pitch": {"unk__749": 1},
    "whisper80": {"batch_size": 1, "N": 4000},
    "whisper80-conv": {"batch_size": 1, "N": 4000},
    "open-nsfw": {"unk__653": 1},
}


def example_inputs(program: CompiledProgram, id: str) -> dict[str, np.ndarray]:
    """Inputs of a model at its sizes in `MODELS`."""
    rng, feed = np.random.default_rng(0), {}
    for node in program.inputs:
        shape, dtype = node.tensor.bind(MODELS[id]), node.dtype.np
        if node.attrs["name"] == "sr":
            feed["sr"] = np.full(shape, 16000, dtype)
        elif node.dtype.is_float:
            feed[node.attrs["name"]] = rng.normal(size=shape).astype(dtype)
        else:
            feed[node.attrs["name"]] = rng.integers(0, 2, shape).astype(dtype)
    return feed
