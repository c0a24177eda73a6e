"""Trained models of the zoo on real input, at several sizes of one program, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import rlx
from conformance.ort_session import open_session
from rlx.zoo.samples import FEEDS, feeds

ZooPath = Callable[..., Path]


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("id", FEEDS)
def test_model(id: str, zoo_path: ZooPath, record_property: Callable[[str, Any], None]) -> None:
    zoo_path("page"), zoo_path("beckett")
    path = zoo_path(id)
    program = rlx.compile(rlx.from_onnx(path))
    assert not program.stats["host_thunks"]
    session = open_session(path)
    inputs = {node.attrs["name"] for node in program.inputs}
    worst = 0.0
    for feed in feeds(id):
        want = session.run(None, feed)
        got = program.run({k: v for k, v in feed.items() if k in inputs})
        for w, g in zip(want, got.values(), strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            worst = max(worst, float(np.abs(w.astype(np.float64) - g).max()))
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=5e-4)
    record_property("max_error", worst)


@pytest.mark.parametrize("id", FEEDS)
def test_model_from_files(id: str, zoo_path: ZooPath, tmp_path: Path) -> None:
    """A model runs at all its sizes from the cache and from a saved file, to the same bits."""
    zoo_path("page"), zoo_path("beckett")
    path = zoo_path(id)
    fresh = rlx.compile(rlx.from_onnx(path))
    fresh.save(tmp_path / "model.rlx")
    rlx.load(path)
    loaded = {"cache": rlx.load(path), "file": rlx.load(tmp_path / "model.rlx")}
    inputs = {node.attrs["name"] for node in fresh.inputs}
    for feed in feeds(id):
        given = {k: v for k, v in feed.items() if k in inputs}
        want = fresh.run(given)
        for origin, program in loaded.items():
            for name, value in program.run(given).items():
                np.testing.assert_array_equal(value, want[name], f"{name} from the {origin}")
