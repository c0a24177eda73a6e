"""Trained models as C and as WebAssembly: the bits of the program, and the values of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from zoo_inputs import MODELS, example_inputs

import rlx
from exported_programs import Library

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("id", MODELS)
def test_models_as_c_and_wasm(  # type: ignore[no-untyped-def]
    id: str, zoo_path: Callable[..., Path], require, tmp_path: Path
) -> None:
    require("wasmtime")
    from exported_modules import WebModel

    zoo_path(id)
    program, sizes = rlx.load(f"zoo:{id}", threads=1), MODELS[id]
    feed = example_inputs(program, id)
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


def test_a_language_model_as_c_and_wasm(zoo_path: Callable[..., Path], require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A prompt, then single tokens: keys and values are states of the export."""
    require("wasmtime")
    from exported_modules import WebModel

    program = rlx.llm.load(zoo_path("smollm2"), context=64, threads=1).program
    ranges = {"past": (0, 63), "new": (1, 8), "wanted": (0, 1)}
    library, web = Library(program, tmp_path, ranges, name="net"), WebModel(program, ranges)
    models = [library.open(threads=2), web]
    stream = program.stream()
    tokens = np.random.default_rng(0).integers(0, 1000, 10)
    past = 0
    for count in (8, 1, 1):
        feed = {
            "past": np.zeros((past, 0), np.int8),
            "tokens": tokens[past : past + count],
            "wanted": np.array([count - 1]),
        }
        want = stream.step(feed)
        for model, exact in zip(models, (True, False), strict=True):
            sizes = {"past": past, "new": count, "wanted": 1}
            model.bind([sizes[s.name] for s in web.tables.symbols])
            for name, value in model.run(feed).items():
                if exact:
                    assert value.tobytes() == want[name].tobytes()
                else:  # other vectors sum in another order
                    assert np.abs(value - want[name]).max() < 1e-2 * np.abs(want[name]).max()
        past += count
