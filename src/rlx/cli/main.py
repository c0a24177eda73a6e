"""Entry point of the `rlx` command.

Exit codes: 0 done; 1 RLX refused or failed, with one sentence on stderr; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rlx import config
from rlx.errors import RlxError

# Optional packages that commands import, and the extra that brings each.
_EXTRA_OF = {"click": "demo", "rich": "demo", "tokenizers": "demo", "safetensors": "demo", "onnx": "onnx"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["zoo", "path", "--help"])
    Usage: rlx zoo path [OPTIONS] MODEL [FILE]
    ...
    0
    """
    try:
        return _run(arguments)
    except RlxError as error:
        if config.TRACEBACK.get():
            raise
        print(f"rlx: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"rlx: the package {error.name!r} is missing; run: pip install 'rlx[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our pipe left (`rlx ... | head`): not an error. Python's own flush at exit
        # would complain again, so give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from rlx.cli.app import app

    try:
        result = app.main(
            args=list(arguments) if arguments is not None else None, prog_name="rlx", standalone_mode=False
        )
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return error.exit_code
    sys.stdout.flush()
    # In this mode click hands back the code of ctx.exit(code); commands themselves return None.
    return result if isinstance(result, int) else 0
