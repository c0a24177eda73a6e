"""What a rewrite costs and saves, and the gate that decides on it."""

from __future__ import annotations

from .calibrate import calibrate
from .decision import Decision, DecisionLog, decide
from .gate import DEFAULT_GATES, IoFusionGate, default_gate
from .profile import FusionBenefit, GraphIoProfile, fusion_benefit

__all__ = [
    "DEFAULT_GATES",
    "Decision",
    "DecisionLog",
    "FusionBenefit",
    "GraphIoProfile",
    "IoFusionGate",
    "calibrate",
    "decide",
    "default_gate",
    "fusion_benefit",
]
