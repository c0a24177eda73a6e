"""A group of commands that answers a wrong name with the nearest right one."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import click

_MODEL_ENDINGS = (".onnx", ".rlx")


class Group(click.Group):
    """A click group with suggestions for misspelt commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {self._instead(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _instead(self, ctx: click.Context, name: str) -> str:
        known = self.list_commands(ctx)
        near = get_close_matches(name, known, n=3)
        if near:
            return f"did you mean {' or '.join(near)}?"
        if "run" in known and (
            name.startswith("zoo:") or name.endswith(_MODEL_ENDINGS) or Path(name).exists()
        ):
            return f"to run a model: {ctx.command_path} run {name}"
        return f"the commands are {', '.join(known)}"
