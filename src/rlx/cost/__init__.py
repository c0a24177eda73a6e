"""What a rewrite costs and saves, and the gate that decides on it."""

from __future__ import annotations

from .calibrate import calibrate
from .decision import Decision, DecisionLog, decide
from .gate import DEFAULT_GATES, IoFusionGate, default_gate
from .io import assumed_binding, profile_graph_io, profile_graph_io_outputs
from .profile import FusionBenefit, GraphIoProfile, fusion_benefit
from .sync import host_sync_op_kinds

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
