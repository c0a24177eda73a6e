"""Arrays that a program is given or bound to: what they must be, and which of them have to be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import InputError
from rlx.ir.bind import check_array

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

Arrays = Mapping[str, np.ndarray]


def in_order(program: CompiledProgram, inputs: Mapping[str, object]) -> list[object]:
    """The values of a dict in the order of the program's inputs."""
    try:
        given = [inputs[name] for name in program.input_names]
    except KeyError as e:
        known = ", ".join(program.input_names)
        raise InputError(
            f"input {e.args[0]!r} of program {program.graph.name!r} is missing; it takes: {known}"
        ) from None
    except TypeError:
        got = type(inputs).__name__
        raise InputError(f"run takes a dict of input name -> array, got a value of type {got}") from None
    if len(inputs) != len(given):
        extra = next(k for k in inputs if k not in program.input_names)
        known = ", ".join(program.input_names) or "none"
        raise InputError(f"unknown input {extra!r}; program {program.graph.name!r} has: {known}")
    return given


def by_name(program: CompiledProgram, inputs: Sequence[object]) -> dict[str, object]:
    """Inputs that were given in order, by their names."""
    if len(inputs) != len(program.inputs):
        raise InputError(
            f"program {program.graph.name!r} takes {len(program.inputs)} inputs, got {len(inputs)}; "
            f"it takes: {', '.join(program.input_names) or 'none'}"
        )
    return dict(zip(program.input_names, inputs, strict=True))


def check_bound(
    program: CompiledProgram, inputs: Arrays, outputs: Arrays, contiguous: bool = False
) -> dict[str, int]:
    """Refuse arrays that a program cannot read from or write to; gives the sizes of symbols."""
    binding: dict[str, int] = {}
    for kind, names, given, nodes in (
        ("input", program.input_names, inputs, program.inputs),
        ("output", program.output_names, outputs, program.outputs),
    ):
        for name, node in zip(names, nodes, strict=True):
            if name not in given:
                raise InputError(f"{kind} {name!r} of program {program.graph.name!r} is missing")
            check_array(node.tensor, given[name], binding, f"{kind} {name!r}")
            if contiguous and not given[name].flags.c_contiguous:
                raise InputError(f"{kind} {name!r} is not contiguous; bind np.ascontiguousarray(array)")
    for name in program.output_names:
        if not outputs[name].flags.writeable:
            raise InputError(f"output {name!r} is an array that cannot be written to; bind a copy of it")
    for a, b in combinations(program.output_names, 2):
        if _overlap(outputs[a], outputs[b]):
            raise InputError(f"outputs {a!r} and {b!r} share memory; bind each to an array of its own")
    return binding


def apart(inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The inputs, with memory for a copy in place of each that outputs are written over: a kernel may write
    where it, or a later one, has yet to read.

    >>> x = np.zeros(8)
    >>> [np.may_share_memory(x, a) for a in apart([x[:4], x[3:5]], [x[4:]])]
    [True, False]
    """
    return [np.empty_like(i) if any(_overlap(i, o) for o in outputs) else i for i in inputs]


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(a.size and b.size) and np.may_share_memory(a, b)
