"""Fail if the environment holds a machine-learning framework: no extra may bring one, however indirectly."""

from __future__ import annotations

import sys
from importlib.metadata import distributions

FRAMEWORKS = ("torch", "tensorflow", "jax")

installed = sorted({(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in distributions()})
if "rlx" not in installed:
    sys.exit(f"rlx is not installed in {sys.prefix}: this check looks at the wrong environment")
found = [
    name for name in installed if name in FRAMEWORKS or name.startswith(tuple(f"{f}-" for f in FRAMEWORKS))
]
if found:
    sys.exit(f"frameworks were installed: {', '.join(found)}")
print(f"{len(installed)} packages, none of them a framework")
