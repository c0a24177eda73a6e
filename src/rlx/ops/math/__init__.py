"""Elementwise ops, reductions, contractions, random numbers."""
