"""Error codes of exported programs and what they say."""

from __future__ import annotations

from enum import IntEnum

from rlx.export.tables import Tables


class Code(IntEnum):
    """Codes that every exported program has; those of sizes and guards follow."""

    OK = 0
    MEMORY = 1
    OPEN = 2
    DAMAGED = 3
    TRUNCATED = 4
    VERSION = 5
    NOT_BOUND = 6
    INDEX = 7
    KERNEL = 8
    BRANCH = 9
    RESET = 10
    DIVISOR = 11
    ARGUMENT = 12
    THREADS = 13
    MACHINE = 14


TEXTS = {
    Code.OK: "no error",
    Code.MEMORY: "the system has no memory for this model",
    Code.OPEN: "the weights cannot be opened; give the path of the file that was exported with this model",
    Code.DAMAGED: "the weights are damaged, or the file holds no weights; export the model again",
    Code.TRUNCATED: "the weights are truncated; copy the file again",
    Code.VERSION: "the weights belong to another export of the model; use the file that was exported with it",
    Code.NOT_BOUND: "no sizes are bound; call bind first",
    Code.INDEX: "an index from data is out of range",
    Code.KERNEL: "a kernel failed",
    Code.BRANCH: "data chose a branch that assumes other sizes than those that are bound",
    Code.RESET: "a run failed and left its states half replaced; call reset first",
    Code.DIVISOR: "these sizes divide by zero; use other sizes",
    Code.THREADS: "the system starts no more threads; use fewer",
    Code.MACHINE: "the system does not let this process use AMX; export the model for a lesser target",
    Code.ARGUMENT: "an argument is not valid: a null pointer, or fewer than 1 thread",
}


def texts_of(tables: Tables) -> list[str]:
    """The texts of all codes of a program, in order.

    >>> len(TEXTS) == len(Code)
    True
    """
    sizes = [f"size {s.name!r} must be from {s.low} to {s.high}" for s in tables.symbols]
    return [*(TEXTS[code] for code in Code), *sizes, *(guard.text for guard in tables.guards)]


def size_code(number: int) -> int:
    """The code of a size that is out of its range."""
    return len(Code) + number


def guard_code(tables: Tables, number: int) -> int:
    """The code of a guard that does not hold."""
    return len(Code) + len(tables.symbols) + number
