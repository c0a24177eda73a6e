"""Passes: named functions from graph to graph, run by `rlx.compile` in one visible order."""
