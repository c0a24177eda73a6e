"""What RLX is doing, reported to the logger "rlx" of Python's `logging`: silent unless a user turns it on.

    import logging
    logging.basicConfig(level="INFO")        # models, programs, caches; "DEBUG": every stage and kernel too

Python's `logging` takes 20 ms to import. Who listens has imported it, so RLX need not.
"""

from __future__ import annotations

import sys

NAME = "rlx"
_DEBUG, _INFO = 10, 20  # levels of logging


def info(text: str, *values: object) -> None:
    """Tell of a step that may take long; `values` are put into `text` if somebody listens."""
    _tell(_INFO, text, values)


def debug(text: str, *values: object) -> None:
    """Tell of a detail: a stage, a kernel."""
    _tell(_DEBUG, text, values)


def _tell(level: int, text: str, values: tuple[object, ...]) -> None:
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger(NAME).log(level, text, *values)
