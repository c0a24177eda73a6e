"""A program to save and to load, and folders that no other test knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.kernel.panels import KernelPanels
from rlx.ops.storage.packing import read_as
from rlx.target.cpu import resolve

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


def layout_graph(columns: int) -> rlx.Graph:
    """A convolution whose packed weights say that a panel has this many columns."""
    lanes = resolve("host").lanes("f32")
    layout = KernelPanels((64, 4, 3, 3), 1, columns, lanes, 1).layout
    g = rlx.Graph("layouts")
    x = g.input("x", (1, 4, 12, 12), "f32")
    w = np.random.default_rng(2).standard_normal((64, 4, 3, 3)).astype(np.float32)
    p = g.param("w", (layout.elements,), "f32", layout.pack(w))
    g.output("y", rlx.ops.conv(x, read_as(p, layout=layout), padding=1))
    return g
