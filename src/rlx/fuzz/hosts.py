"""The machines of a run: RLX treats this machine as a lesser one."""

from __future__ import annotations

from rlx import config
from rlx.errors import ConfigError
from rlx.target.cpu import resolve, runs_here, targets


def named(host: str) -> list[str]:
    """The hosts that a name stands for: itself, or for "all" every target that this machine runs.

    >>> "x86-64" in named("all") or "aarch64" in named("all")
    True
    """
    if host == "all":
        return [t.name for t in targets() if runs_here(t)]
    if host != "host" and not runs_here(resolve(host)):
        raise ConfigError(f"this machine cannot run code for {host}; choose one of {', '.join(named('all'))}")
    return [resolve(host).name]


def environment(host: str) -> dict[str, str]:
    """The variables of a process that shall see that host; no other choice of code is inherited."""
    return {config.HOST.name: host, config.TARGET.name: ""}
