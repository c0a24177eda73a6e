"""What RLX asks of the operating system.

`base.py` has what any system can do. A module per system has what that one does better, and says what it
lacks; no other part of RLX asks which system it is on. Only the module of this system is imported, as those
of others need what is not here.
"""

from __future__ import annotations

import sys

from rlx.system.base import System

if sys.platform == "linux":
    from rlx.system.linux import Linux as _Here
elif sys.platform == "darwin":
    from rlx.system.macos import MacOS as _Here
elif sys.platform == "win32":
    from rlx.system.windows import Windows as _Here
else:
    _Here = System

SYSTEM: System = _Here()
"""The system that this process runs on."""
