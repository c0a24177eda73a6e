"""Transforms of graphs and functions that follow from the op rules: grad, jvp, vmap, expansion."""
