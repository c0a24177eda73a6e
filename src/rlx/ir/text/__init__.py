"""Graphs as text and as files, and how two of them differ."""
