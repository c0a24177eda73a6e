"""Entry point of the `rlx` command.

Exit codes: 0 done; 1 RLX refused or failed, with one sentence on stderr (none if the reader of its output
left, as in `rlx ... | head`); 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rlx import config
from rlx.errors import RlxError, provenance

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
        with provenance(()):  # no line of the user's runs here
            return _run(arguments)
    except RlxError as error:
        if config.TRACEBACK.get():
            raise
        print(f"rlx: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        fix = f"pip install 'rlx[{_EXTRA_OF[package]}]'"
        print(f"rlx: the package {package!r} is missing; run: {fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # click has handled this while the command ran; here it is the last flush. Python's own flush at
        # exit would complain once more, so give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError as error:
        if config.TRACEBACK.get():
            raise
        print(f"rlx: not enough memory ({error}); choose smaller sizes", file=sys.stderr)
        return 1
    except OSError as error:  # a file or folder that may not be read or written
        if config.TRACEBACK.get() or error.filename is None:
            raise
        print(f"rlx: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


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
