"""rlx trust: accept the native code in a .rlx file from somebody else."""

from __future__ import annotations

import click

from rlx.cli.output import json_option, print_json, print_line, progress
from rlx.runtime.store.artifact import Artifact


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--verify", is_flag=True, help="Only compare every byte with its checksum; accept nothing.")
@json_option
def trust(file: str, verify: bool, as_json: bool) -> None:
    """Run the native code in FILE from now on, as if you had compiled it yourself.

    Native code can do everything that you can do. Accept it only from people you would let use your account.
    Without this command, RLX does not run that code but compiles the model again. FILE is not changed: RLX
    stores the acceptance next to your signing key, and it is valid for exactly this content, with weights.
    """
    with progress(f"checking {file}"):
        opened = Artifact(file)
        targets = opened.verify() if verify else opened.accept()
    if as_json:
        print_json({"file": file, "targets": targets})
    elif verify:
        whose = f"code for {', '.join(targets)} is trusted" if targets else "no code in it is trusted"
        print_line(f"{file}: whole; {whose}")
    else:
        print_line(f"{file}: code for {', '.join(targets)} is trusted")
