"""rlx trust: accept the native code in a .rlx file that somebody else made."""

from __future__ import annotations

import click

from rlx.cli.output import print_json, progress


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def trust(file: str, as_json: bool) -> None:
    """Run the code in FILE from now on, as if you had compiled it yourself.

    Native code can do whatever you can do. Accept it from people you would let use your account; without
    this, RLX makes the code again from the plan in the file, which cannot do harm. FILE is not changed: the
    acceptance is noted beside your signing key, and holds for this very content only.
    """
    from rlx.runtime.artifact import Artifact

    with progress(f"checking {file}"):
        targets = Artifact(file).accept()
    if as_json:
        print_json({"file": file, "targets": targets})
    else:
        click.echo(f"{file}: code for {', '.join(targets)} is trusted")
