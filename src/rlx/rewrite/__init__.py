"""Rewrites: named functions from graph to graph, run by `rlx.api.planning` in one visible order."""
