"""Ops that move, pick, place or make elements."""
