"""Fixtures of the tests of streamed weights, which several files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming_models import BUDGET, layers, sample

import rlx


@pytest.fixture(scope="module")
def layers_result() -> np.ndarray:
    """What `layers()` makes of `sample()` with all weights in memory."""
    result: np.ndarray = rlx.compile(layers())(sample())
    return result


@pytest.fixture
def layers_file(tmp_path: Path) -> Path:
    """`layers()`, compiled and saved."""
    path = tmp_path / "layers.rlx"
    rlx.compile(layers()).save(path)
    return path


@pytest.fixture
def streamed(layers_file: Path) -> Any:
    """`layers()` from its file, within BUDGET."""
    return rlx.load(layers_file, weight_budget=BUDGET)
