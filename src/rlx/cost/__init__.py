"""What a rewrite costs and saves, and the gate that decides on it."""

from __future__ import annotations

from rlx.cost.calibrate import calibrate
from rlx.cost.decision import Decision, DecisionLog, decide
from rlx.cost.gate import DEFAULT_GATES, IoFusionGate, default_gate
from rlx.cost.io import assumed_binding, profile_graph_io, profile_graph_io_outputs
from rlx.cost.profile import FusionBenefit, GraphIoProfile, fusion_benefit
from rlx.cost.sync import host_sync_op_kinds

__all__ = [
    "DEFAULT_GATES",
    "Decision",
    "DecisionLog",
    "FusionBenefit",
    "GraphIoProfile",
    "IoFusionGate",
    "assumed_binding",
    "calibrate",
    "decide",
    "default_gate",
    "fusion_benefit",
    "host_sync_op_kinds",
    "profile_graph_io",
    "profile_graph_io_outputs",
]
