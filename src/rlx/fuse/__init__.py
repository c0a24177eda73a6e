"""Fusion: which ops become one kernel, priced by the gate of `rlx.cost`."""
