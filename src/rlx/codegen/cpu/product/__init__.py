"""Matmuls."""
