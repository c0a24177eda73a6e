"""The table of commands. A command's file is imported only when it runs, so `rlx --help` is quick."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

import click

from rlx import config

# Name of the command: (file in rlx/cli, which defines a click command of that file's name), one line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run a model on files or made-up inputs; show outputs, times, a trace."),
    "compile": ("compile", "Compile a model into a .rlx file that loads in a moment."),
    "explain": ("explain", "Show kernels, fusion decisions with their prices, memory."),
    "diff": ("diff", "Show what differs between two programs."),
    "demo": ("demo", "Semantic search with a trained encoder, compiled here and now."),
    "bench": ("bench", "RLX beside other engines, measured in one interleaved run."),
    "zoo": ("zoo", "List and fetch the trained models that RLX is tested with."),
    "devices": ("devices", "List devices and CPU targets, and what is missing for the rest."),
    "cache": ("cache", "Show or delete compiled code and programs of earlier runs."),
    "trust": ("trust", "Accept the native code in a .rlx file that somebody else made."),
    "launch": ("launch", "Run a script on several ranks."),
}


class LazyGroup(click.Group):
    """A click group that reads its commands from COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        file, _ = COMMANDS[cmd_name]
        command = getattr(import_module(f"rlx.cli.{file}"), file)
        assert isinstance(command, click.Command), f"rlx/cli/{file}.py defines no click command {file!r}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Environment"):
            formatter.write_dl(
                [(knob.name, f"{knob.meaning} [{knob.default_text}]") for knob in config.KNOBS]
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("rlx"), "--version", prog_name="rlx")
def app() -> None:
    """RLX: compile a model to native code, run it, and see why it is fast."""
