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
