"""Ops that move, select, place or create elements."""
