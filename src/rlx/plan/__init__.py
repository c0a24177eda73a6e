"""From an optimised graph to a plan: order, lifetimes, offsets, proofs and explanations."""

from __future__ import annotations
