"""Machines: what they are, and what things cost on them. Named targets are fixed, not measured."""
