"""Backends: the NumPy reference and native code generators."""
