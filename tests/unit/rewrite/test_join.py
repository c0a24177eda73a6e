"""Welch -> peaks on real graphs: the gate joins them or keeps them apart, and says why."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.cost import IoFusionGate, host_sync_op_kinds, profile_graph_io
from rlx.cost.profile import GraphIoProfile
from rlx.ir.graph import Graph
from rlx.plan.explain import explain
from rlx.reference.interpreter import evaluate
from rlx.rewrite.join import join_blocks

LEGACY = IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000, legacy_unified_readback=True)
UNIFIED = IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000)
DISCRETE = IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000)
SIGNALS, BINS, PEAKS = 8192, 1025, 16


def spectra(signals: int = SIGNALS, time: int = 16_384, nperseg: int = 2_048, keep: bool = False) -> Graph:
    """The k highest peaks of each signal's spectrum, which is 32 MiB for all of them."""
    g = rlx.Graph("spectra")
    x = g.input("x", (signals, time), "f32")
    _, power = ops.welch(x, fs=100.0, nperseg=nperseg)
    at, value = ops.spectral_peaks(power, PEAKS, 100.0 / nperseg)
    g.output("at", at)
    g.output("value", value)
    if keep:
        g.output("power", power)
    return g


def names(graph: Graph) -> set[str]:
    return {n.op.name for n in graph.nodes}


def test_the_legacy_gate_joins_welch_and_peaks_and_the_discrete_gate_refuses() -> None:
    """On devices without a kernel for them, both by the same profiles."""
    assert "welch_peaks" in host_sync_op_kinds("metal") and "welch_peaks" in host_sync_op_kinds("cuda")
    joined, (kept,) = join_blocks(spectra(), LEGACY, backend="metal")
    apart, (refused,) = join_blocks(spectra(), DISCRETE, backend="cuda")
    assert kept.verdict and "welch_peaks" in names(joined)
    assert not refused.verdict and names(apart) == {"input", "welch", "spectral_peaks", "result"}
    dense, few = SIGNALS * BINS * 4, SIGNALS * PEAKS * 2 * 4
    signal = SIGNALS * 16_384 * 4
    for decision in (kept, refused):
        assert decision.before == GraphIoProfile(1, 0, dense, signal + dense)
        assert decision.after == GraphIoProfile(1, 1, few, signal + few)
    saved = dense - few
    assert kept.score_ps == -5_000_000 + saved * 1_000 + saved * 1_000 // 200 - 2_000_000_000
    assert refused.score_ps == -30_000_000 + saved * 1_000 // 100 + saved * 1_000 // 40 - 25_000_000_000
    assert "adds 1 host wait" in kept.reason and "loses time" in refused.reason
    assert any("test_join.py" in w for w in refused.where)


def test_free_readback_turns_the_unified_verdict() -> None:
    _, (decision,) = join_blocks(spectra(), UNIFIED, backend="metal")
    assert not decision.verdict


def test_a_spectrum_that_is_needed_anyway_is_not_given_up() -> None:
    """Joining would compute it twice."""
    joined, (decision,) = join_blocks(spectra(keep=True), LEGACY, backend="metal")
    assert decision.after.kernel_launches == 2 and not decision.verdict
    assert "welch_peaks" not in names(joined)


@pytest.mark.parametrize("change", ["spacing", "median", "window"])
def test_only_the_same_computation_is_joined(change: str) -> None:
    g = rlx.Graph("other")
    x = g.input("x", (4, 256), "f32")
    window = np.hanning(64).astype(np.float32) if change == "window" else "hann"
    average = "median" if change == "median" else "mean"
    _, power = ops.welch(x, nperseg=64, window=window, average=average)
    at, value = ops.spectral_peaks(power, 3, 1.0 if change == "spacing" else 1 / 64)
    g.output("at", at)
    g.output("value", value)
    joined, decisions = join_blocks(g, LEGACY, backend="metal")
    assert joined is g and not decisions


def test_joining_does_not_change_results() -> None:
    g = spectra(3, 512, 64)
    eager = IoFusionGate(0, 0, 200, 200, True, 0, 0, legacy_unified_readback=True)
    joined, (decision,) = join_blocks(g, eager, backend="metal")
    assert decision.verdict and "welch" not in names(joined)
    feed = {"x": np.random.default_rng(0).standard_normal((3, 512), np.float32)}
    want, got = evaluate(g, feed), evaluate(joined, feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
    native = rlx.compile(g).run(feed)
    np.testing.assert_allclose(native["value"], want["value"], rtol=1e-4)


def test_the_page_of_a_program_shows_the_decision() -> None:
    """The CPU computes both ways by the same kernels: nothing to gain, and the page says so."""
    lir = plan(spectra(3, 512, 64), target="x86-64-v3")
    page = explain(lir)
    assert "join welch_peaks welch + spectral_peaks: io 0 ns, compute 0 ns: changes no IO" in page
    (decision,) = [d for d in lir.trace.decisions if d.ops]
    assert decision.before == decision.after and not decision.verdict


def test_profiles_of_the_two_graphs_differ_by_what_the_gate_is_told() -> None:
    """The whole-graph profile of the joined program is the region's: nothing else is in the graph."""
    joined, (decision,) = join_blocks(spectra(), LEGACY, backend="metal")
    assert profile_graph_io(joined, backend="metal") == decision.after
