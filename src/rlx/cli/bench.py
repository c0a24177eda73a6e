"""rlx bench: RLX and the other engines that are installed, measured in one interleaved run.

The harness with its workloads and engines is in the repository's folder `bench`, not in the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rlx.errors import ConfigError

HARNESS = "rlx_bench"


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure RLX and the other engines that are installed, side by side."""
    folder = str(harness_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from rlx_bench.command import bench as command  # where the repository is

    code = command.main(args=list(arguments), prog_name="rlx bench", standalone_mode=False)
    if code:
        raise click.exceptions.Exit(code)


def harness_folder() -> Path:
    """The repository's folder with the harness: of this source tree, or below the current folder."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "bench" / HARNESS / "__init__.py").exists():
            return root / "bench"
    raise ConfigError(
        "rlx bench needs the repository, which holds the workloads: clone it, install it with "
        "pip install -e '.[bench]', and run rlx bench there"
    )
