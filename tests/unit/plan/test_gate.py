"""The IO fusion gate: published decisions to the digit, exact scores, and records that answer questions."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cost import (
    DEFAULT_GATES,
    Decision,
    DecisionLog,
    FusionBenefit,
    GraphIoProfile,
    IoFusionGate,
    calibrate,
    decide,
    default_gate,
    fusion_benefit,
)
from rlx.errors import ConfigError, DeviceError, FormatError, UnsupportedError

DENSE = GraphIoProfile(3, 0, 33_554_432, 184_549_376)
FUSED = GraphIoProfile(4, 1, 1_048_576, 219_152_384)
UNIFIED = (500, 5_000, 200, 200, True, 2_000_000, 1_000)
DISCRETE = (3_000, 30_000, 100, 40, False, 25_000_000, 10_000)

counts = st.integers(-(10**6), 10**6)
byte_counts = st.integers(-(10**13), 10**13)
benefits = st.builds(FusionBenefit, counts, counts, byte_counts, byte_counts)
times = st.integers(0, 10**8) | st.floats(0, 1e8)
bandwidths = st.integers(1, 5_000) | st.floats(1e-3, 5e3)
gates = st.builds(
    IoFusionGate, times, times, bandwidths, bandwidths, st.booleans(), times, times, st.booleans()
)


def test_published_unified_decision_with_legacy_readback() -> None:
    gate = IoFusionGate(*UNIFIED, legacy_unified_readback=True)
    assert gate.score_ps(fusion_benefit(DENSE, FUSED)) == 30_327_340_960
    assert gate.score_ns(fusion_benefit(DENSE, FUSED)) == 30_327_340.96
    assert gate.should_fuse(DENSE, FUSED)


def test_published_unified_decision_with_free_readback() -> None:
    gate = IoFusionGate(*UNIFIED)
    assert gate.score_ns(fusion_benefit(DENSE, FUSED)) == -2_178_515.04
    assert not gate.should_fuse(DENSE, FUSED)


@pytest.mark.parametrize("legacy", [False, True])
def test_published_discrete_decision_does_not_depend_on_the_legacy_flag(legacy: bool) -> None:
    gate = IoFusionGate(*DISCRETE, legacy_unified_readback=legacy)
    assert gate.score_ps(fusion_benefit(DENSE, FUSED)) == -24_566_383_680
    assert gate.score_ns(fusion_benefit(DENSE, FUSED)) == -24_566_383.68
    assert not gate.should_fuse(DENSE, FUSED)


def test_plain_score_has_no_thunk_penalty() -> None:
    benefit = fusion_benefit(DENSE, FUSED)
    assert benefit == FusionBenefit(-1, -1, 32_505_856, -34_603_008)
    assert benefit.score_ns(*DISCRETE[:5]) == 433_616.32
    assert benefit.should_fuse(*DISCRETE[:5], min_gain_ns=10_000)
    assert not benefit.should_fuse(*UNIFIED[:5], min_gain_ns=1_000)
    assert benefit.should_fuse(*UNIFIED[:5], min_gain_ns=1_000, legacy_unified_readback=True)


@given(gates, benefits)
def test_score_is_the_exact_formula_rounded_down(gate: IoFusionGate, benefit: FusionBenefit) -> None:
    readback = 1 / Fraction(gate.host_readback_bw)
    if gate.unified_memory:
        readback = Fraction(int(gate.legacy_unified_readback))
    plain = (
        benefit.launches_saved * Fraction(gate.dispatch_ns)
        + benefit.sync_points_saved * Fraction(gate.roundtrip_ns)
        + benefit.device_traffic_bytes_saved / Fraction(gate.memory_bw)
        + benefit.host_readback_bytes_saved * readback
    )
    penalty_ps = math.ceil(Fraction(gate.host_thunk_penalty_ns) * 1000)
    expected = math.floor(plain * 1000) - max(0, -benefit.sync_points_saved) * penalty_ps
    assert gate.score_ps(benefit) == expected
    # Rounded once to the nearest float: within 0.01 wherever a float can hold hundredths.
    assert gate.score_ns(benefit) == expected / 1000
    loss = abs(Fraction(gate.score_ns(benefit)) - Fraction(expected, 1000))
    assert loss <= max(0.01, abs(expected) * 2**-62)


@given(gates, st.builds(GraphIoProfile, *[st.integers(0, 10**9)] * 4), st.integers(-(10**12), 10**12))
def test_min_gain_is_reached_exactly(gate: IoFusionGate, profile: GraphIoProfile, compute: int) -> None:
    least = math.ceil(Fraction(gate.min_gain_ns) * 1000)
    assert gate.accepts(least + compute, compute)
    assert not gate.accepts(least + compute - 1, compute)
    assert gate.should_fuse(profile, profile) == (gate.min_gain_ns == 0)


@given(st.lists(st.builds(GraphIoProfile, *[st.integers(0, 10**9)] * 4), min_size=2, max_size=6))
def test_profiles_add_so_that_a_region_decides_for_its_graph(parts: list[GraphIoProfile]) -> None:
    rest = sum(parts[2:], GraphIoProfile())
    before, after = parts[0], parts[1]
    assert fusion_benefit(rest + before, rest + after) == fusion_benefit(before, after)
    assert rest + before - before == rest


@pytest.mark.parametrize("bandwidth", [0, -1, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["memory_bw", "host_readback_bw"])
def test_a_bandwidth_that_is_not_positive_is_refused_by_name(name: str, bandwidth: float) -> None:
    constants = default_gate("cpu").constants()
    constants[name] = bandwidth
    with pytest.raises(ConfigError, match=rf"{name} is .*give a positive bandwidth"):
        IoFusionGate(**constants)
    with pytest.raises(ConfigError, match=name):
        both = {"memory_bw": 1, "host_readback_bw": 1, name: bandwidth}
        FusionBenefit(1, 0, 0, 0).score_ns(1, 1, unified_memory=True, **both)


@pytest.mark.parametrize("name", ["dispatch_ns", "roundtrip_ns", "host_thunk_penalty_ns", "min_gain_ns"])
def test_a_negative_time_is_refused_by_name(name: str) -> None:
    constants = default_gate("cpu").constants()
    constants[name] = -1
    with pytest.raises(ConfigError, match=rf"{name} is -1"):
        IoFusionGate(**constants)


def test_every_device_has_a_gate_and_an_unknown_one_is_named() -> None:
    assert {"cpu", "opencl", "gpu", "cuda", "rocm", "metal", "tpu", "wasm"} == set(DEFAULT_GATES)
    for gate in DEFAULT_GATES.values():
        assert IoFusionGate(**gate.constants()) == gate
    with pytest.raises(DeviceError, match=r"'npu'.*cpu, opencl"):
        default_gate("npu")


def test_calibrate_measures_plausible_constants() -> None:
    calls: list[int] = []
    gate = calibrate("cpu", run_empty_records=calls.append)
    assert 0.1 <= gate.memory_bw <= 2_000
    assert gate.roundtrip_ns >= 1 and gate.host_thunk_penalty_ns >= 1 and gate.dispatch_ns >= 1
    assert gate.min_gain_ns == default_gate("cpu").min_gain_ns
    assert max(calls) > 10 * min(calls)
    with pytest.raises(
        UnsupportedError, match=r"cannot measure 'cuda': .* no driver for cuda; use default_gate"
    ):
        calibrate("cuda")


def test_added_compute_turns_a_verdict() -> None:
    gate = default_gate("cpu")
    before, after = GraphIoProfile(2, 0, 0, 50_000), GraphIoProfile(1, 0, 0, 25_000)
    kept = decide(gate, (3, 1), before, after, compute_ps_added=1_100_000)
    refused = decide(gate, (3, 1), before, after, compute_ps_added=1_100_001)
    assert kept.score_ps == 1_200_000
    assert (kept.verdict, refused.verdict) == (True, False)
    assert refused.reason == "saves 1 launch, 24.4 KiB of traffic; gains less than 100 ns (+100 ns)"


def test_a_pin_overrules_the_gate_and_is_recorded() -> None:
    decision = decide(
        IoFusionGate(*DISCRETE), (5, 2), DENSE, FUSED, rule="welch_peaks", where=("spectra.py:12",), pin=True
    )
    assert decision.verdict and decision.pinned and decision.score_ps == -24_566_383_680
    assert str(decision) == (
        "keep (pinned) welch_peaks [%2 %5]: io -24.57 ms, compute 0 ns: saves 31 MiB of readback; "
        "adds 1 launch, 1 host wait, 33 MiB of traffic; pinned by the user (at spectra.py:12)"
    )


def test_why_not_answers_for_two_nodes() -> None:
    gate = IoFusionGate(*DISCRETE)
    log = DecisionLog()
    log.add(decide(gate, (1, 2), DENSE, FUSED, compute_ps_added=5))
    log.add(decide(gate, (1, 2, 3), DENSE, FUSED))
    log.add(decide(gate, (3, 4), DENSE, DENSE - GraphIoProfile(kernel_launches=5)))
    assert log.why_not(2, 1) == str(log[1])  # the refusal that came nearer
    assert "loses time (-24.57 ms)" in log.why_not(1, 3)
    assert log.why_not(4, 3).startswith("%4 and %3 are one kernel: keep fuse [%3 %4]")
    assert log.why_not(1, 4) == "%1 and %4 were never considered together: no rule matches a region with both"
    assert [d.region for d in log.kept()] == [(3, 4)]
    assert len(log.refused()) == 2 and len(log.about(3)) == 2 and len(log.about()) == 3


def test_largest_and_rank_are_total_orders() -> None:
    zero = GraphIoProfile()
    records = [Decision((n,), zero, zero, score, 0, score > 0, "") for n, score in enumerate([5, -9, 5, 9])]
    assert [d.region for d in DecisionLog(records).largest(3)] == [(1,), (3,), (0,)]
    assert [d.region for d in sorted(records, key=lambda d: d.rank)] == [(3,), (0,), (2,), (1,)]


def test_decisions_survive_json() -> None:
    log = DecisionLog([decide(IoFusionGate(*UNIFIED), (8, 9), DENSE, FUSED, 7, where=("a.py:1", "b.py:2"))])
    assert list(DecisionLog.from_json(json.loads(json.dumps(log.to_json())))) == list(log)
    with pytest.raises(FormatError, match=r"not a fusion decision.*score_ps"):
        DecisionLog.from_json([{"region": [1], "before": [1], "after": [1]}])
