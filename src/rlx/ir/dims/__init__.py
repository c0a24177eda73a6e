"""Symbolic sizes behind `rlx.ir.dim`: atoms, algebra, bounds, text, and choices by size."""
