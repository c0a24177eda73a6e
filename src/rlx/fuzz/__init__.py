"""Fuzzing: random programs as users write them, and mutated files.

`python -m rlx.fuzz --programs 500 --seed 7` writes programs, runs each in several ways and compares the
results with the NumPy reference and with itself; a finding is shrunk to a few lines of Python.
`python -m rlx.fuzz files --seed 7` changes attributes in plans, graphs, artefacts and models and reads them.
"""

from __future__ import annotations
