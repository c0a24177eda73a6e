"""rlx launch: a script on several ranks."""

from __future__ import annotations

import click

from rlx.dist.launch import DEFAULT_HEAP_BYTES
from rlx.dist.launch import launch as run_ranks

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class _Bytes(click.ParamType):
    """A number of bytes, like 64M."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).upper().removesuffix("IB").removesuffix("B")
        number, unit = (text[:-1], text[-1]) if text[-1:] in ("K", "M", "G") else (text, "")
        if not number.isdecimal() or int(number) < 1:
            self.fail(f"{value!r} is not a size like 64M", param, ctx)
        return int(number) * _UNITS[unit]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks to start.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option("--mpi", is_flag=True, help="Start the ranks with mpiexec, on this machine or many.")
@click.option(
    "--hostfile", type=click.Path(exists=True, dir_okay=False), help="File with the hosts for --mpi."
)
@click.option("--heap", type=_Bytes(), help="Shared memory per rank, like 64M.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds a rank waits for the others."
)
@click.option(
    "--bind/--no-bind",
    default=True,
    show_default=True,
    help="Bind each rank to its share of the cores, with as many threads.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    ranks: int,
    module: bool,
    mpi: bool,
    hostfile: str | None,
    heap: int | None,
    timeout: float | None,
    bind: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS on several ranks, and stop all of them when one fails.

    The exit code is 0, or that of the first rank that failed.
    """
    ctx.exit(
        run_ranks(
            ranks,
            script,
            args,
            module=module,
            mpi=mpi,
            hostfile=hostfile,
            heap_size=heap or DEFAULT_HEAP_BYTES,
            timeout=timeout,
            bind=bind,
        )
    )
