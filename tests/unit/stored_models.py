"""A program to save and to load, and folders that no other test knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx

X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)


def set_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a key of the test's own; the function of a fixture."""
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def network() -> rlx.Graph:
    """Two products with packed weights, a large constant, a state: everything a file must hold."""
    rng = np.random.default_rng(1)
    g = rlx.Graph("network")
    x = g.input("x", ("n", 40), "f32")
    w = g.param("w", (40, 24), "f32", rng.standard_normal((40, 24)).astype(np.float32))
    v = g.param("v", (24, 8), "f32", rng.standard_normal((24, 8)).astype(np.float32))
    table = g.constant(rng.standard_normal((24,) * 2).astype(np.float32))
    total = g.state("total", (8,), "f32", np.full(8, 3, np.float32))
    y = rlx.ops.gelu(x @ w @ table) @ v
    g.output("y", y + total)
    g.set_state("total", total + rlx.ops.sum(y, axis=0))
    return g
