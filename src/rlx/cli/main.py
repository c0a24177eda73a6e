"""Entry point of the `rlx` command.

Exit codes: 0 done; 1 RLX refused or failed, with one sentence on stderr (none if the reader of its output
left, as in `rlx ... | head`); 2 wrong usage; 3 `rlx diff` found a difference; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unicodedata import category

from rlx import config
from rlx.errors import RlxError, how_to_install, provenance

# Optional packages that commands import, and the extra that brings each.
_EXTRA_OF = {
    "click": "cli",
    "rich": "cli",
    "tokenizers": "demo",
    "safetensors": "demo",
    "onnx": "onnx",
    "scipy": "bench",
    "jinja2": "llm",
    "starlette": "serve",
    "uvicorn": "serve",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["zoo", "path", "--help"])
    Usage: rlx zoo path [OPTIONS] MODEL [FILE]
    ...
    0
    """
    try:
        with provenance(()), _plain_output():  # no line of the user's runs here
            return _run(arguments)
    except RlxError as error:
        if config.TRACEBACK.get():
            raise
        return _refused(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        return _refused(f"the package {package!r} is missing; {how_to_install(_EXTRA_OF[package])}")
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
        return _refused(f"not enough memory ({error}); choose smaller sizes")
    except OSError as error:  # a file or folder that may not be read or written
        if config.TRACEBACK.get() or error.filename is None:
            raise
        return _refused(f"cannot use {error.filename}: {error.strerror}")


def _refused(text: str) -> int:
    """One sentence on stderr; click and rich may be missing, so this does not go through `rlx.cli.output`."""
    shown = "".join(repr(c)[1:-1] if category(c) in ("Cc", "Cs") and c != "\n" else c for c in text)
    print(f"rlx: {shown}", file=sys.stderr)
    return 1


@contextmanager
def _plain_output() -> Iterator[None]:
    """Warnings are one line without Python's file and code; a terminal without Unicode gets escapes."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"rlx: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from rlx.cli.app import app  # needs packages of an extra; the caller says which one is missing

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
