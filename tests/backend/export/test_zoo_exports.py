"""Trained models as C and as WebAssembly: the bits of the program, and the values of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from exported_programs import Library

pytestmark = pytest.mark.slow

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
}


@pytest.mark.parametrize("id", MODELS)
def test_models_as_c_and_wasm(  # type: ignore[no-untyped-def]
    id: str, zoo_path: Callable[..., Path], require, tmp_path: Path
) -> None:
    require("wasmtime")
    from exported_modules import WebModel

    zoo_path(id)
    program, sizes = rlx.load(f"zoo:{id}", threads=1), MODELS[id]
    rng, feed = np.random.default_rng(0), {}
    for node in program.inputs:
        shape, dtype = node.tensor.bind(sizes), node.dtype.np
        if node.attrs["name"] == "sr":
            feed["sr"] = np.full(shape, 16000, dtype)
        elif node.dtype.is_float:
            feed[node.attrs["name"]] = rng.normal(size=shape).astype(dtype)
        else:
            feed[node.attrs["name"]] = rng.integers(0, 2, shape).astype(dtype)
    want = program.run(feed)
    ranges = {name: (min(size, 1), size) for name, size in sizes.items()}
    library = Library(program, tmp_path, ranges, name="net")
    order = [sizes[s.name] for s in library.tables.symbols]
    for threads in (1, 2):
        model = library.open(threads=threads)
        model.bind(order)
        for name, value in model.run(feed).items():
            assert value.tobytes() == want[name].tobytes()
        model.close()
    web = WebModel(program, ranges)
    web.bind(order)
    for name, value in web.run(feed).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-4)
