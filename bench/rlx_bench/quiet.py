"""Timed processes go first."""

from __future__ import annotations

import os


def take_precedence() -> None:
    """Ask the scheduler for precedence, where it lets us: sessions are scheduled as groups."""
    try:
        if os.getsid(0) != os.getpid():
            os.setsid()
        with open("/proc/self/autogroup", "w") as f:
            f.write("-19")
    except OSError:
        pass
