"""The table of commands. A command's file is imported only when it runs, so `rlx --help` is quick."""

from __future__ import annotations

from importlib import import_module

import click

from rlx import config
from rlx.cli.group import Group

# Name of the command: (file in rlx/cli, which defines a click command of that file's name), one line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run a model; show its outputs and how long it takes."),
    "chat": ("chat", "Ask a language model, or talk to it."),
    "serve": ("serve", "Serve a language model over HTTP, as OpenAI's clients expect it."),
    "compile": ("compile", "Compile a model to a .rlx file that loads quickly."),
    "export": ("export", "Write a model for C or WebAssembly, to run without Python."),
    "explain": ("explain", "Show kernels with their costs, fusion decisions and memory."),
    "diff": ("diff", "Show what differs between two models or plans."),
    "demo": ("demo", "Search sentences by meaning with a trained encoder."),
    "bench": ("bench", "Compare the speed of RLX with other engines."),
    "zoo": ("zoo", "List and fetch trained models."),
    "devices": ("devices", "List devices and CPU targets, and what is missing for the others."),
    "doctor": ("doctor", "Check this installation, and say what to install."),
    "cache": ("cache", "Show or delete cached code and programs."),
    "trust": ("trust", "Accept the native code in a .rlx file from somebody else."),
    "launch": ("launch", "Run a script on several ranks (processes)."),
}


class LazyGroup(Group):
    """A group that reads its commands from COMMANDS."""

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
@click.version_option(config.VERSION, "--version", prog_name="rlx")
def app() -> None:
    """RLX compiles ML models to native code, runs them, and shows what it did."""
