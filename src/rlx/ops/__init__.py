"""Every op, declared once. Public functions follow NumPy's names and keywords."""

from __future__ import annotations

from rlx.ops import contract, elementwise, reduce, region, shape, structural
from rlx.ops.contract import *  # noqa: F403
